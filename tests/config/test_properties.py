"""Any input gives a valid configuration that survives its own flags, or an error of one line.

Random argvs, random YAML trees as ``--config`` and as a recipe, and random values of fields, over
every dataclass of arguments. conftest's profile says how many; they are the same each time.
"""

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dschat.chat.load import ChatConfig
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.data import ShowConfig
from dschat.inference.protocol import SamplingParams
from dschat.launch import recipe, run_plan
from dschat.launch.recipe import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = (SFTConfig, RewardConfig, RLHFConfig, ChatConfig, ShowConfig, TrainConfig)
STEPS = (SFTConfig, RewardConfig, RLHFConfig)
REQUIRED = {
    RLHFConfig: {"actor_model_name_or_path": "a", "critic_model_name_or_path": "b"},
    ChatConfig: {"path": "a"},
}
without_deadline = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

awkward = st.sampled_from(
    [
        *("", " ", "-", "--", "-1", "--seed", "=", "true", "False", "none", "null", "nan", "inf"),
        *("-inf", "1e400", "1_000", "0x10", "1.5", "-0", "1" * 400, "9" * 30, "2,4,4", "0,0,0"),
        *("nan,1,1", "1,2", "a,b,c", "{step1}", "{", "%s", "%", "ä\u2028b", "\x85", "\ud800", "💬"),
        *("a\nb", "/", ".", "..", "~nobody", "bf16", "cosine", "builtin/tiny", "a:0", "a:nan"),
    ]
)
numbers = st.one_of(
    st.integers(),
    st.integers(-3, 5),
    st.floats(),
    st.sampled_from([math.nan, math.inf, 10**400, -(2**63), 2**63, 2**31, 1e308, 5e-324]),
)
words = st.one_of(awkward, st.text(max_size=6), numbers.map(str))
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
anything = st.recursive(
    st.one_of(scalars, st.binary(max_size=3), st.dates()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=5,
)


def names_of(config_class):
    return sorted(f.name for f in fields(config_class))


def right_values(hint):
    """Values of a field's type, sensible or not."""
    text = str(hint)
    if "Literal" in text:
        return st.sampled_from([c for c in get_args(hint) if isinstance(c, str)] or ["1", "2"])
    if "list[" in text:
        return st.lists(numbers if "float" in text or "int" in text else words, max_size=3)
    if "dict[" in text:
        return st.dictionaries(words, st.none() | st.booleans() | words, max_size=2)
    for kind, values in (("bool", st.booleans()), ("int", numbers), ("float", numbers)):
        if kind in text:
            return values
    return words


def field_values(config_class):
    """{field: value}: mostly of the right type, sometimes anything."""
    hints = get_type_hints(config_class)
    pairs = st.sampled_from(names_of(config_class)).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(right_values(hints[name]), anything))
    )
    return st.lists(pairs, max_size=4).map(dict)


def argvs(config_class):
    flags = sorted(parser.flag_names(config_class))
    name = st.one_of(st.sampled_from(flags), st.text("abcdeimnorst_-", min_size=1, max_size=8))
    spelled = st.one_of(name, name.map(lambda n: n.replace("_", "-")))
    dashed = spelled.map(lambda n: f"--{n}")
    group = st.builds(lambda f, values: [f, *values], dashed, st.lists(words, max_size=2))
    joined = st.builds(lambda f, value: [f"{f}={value}"], dashed, words)
    groups = st.lists(st.one_of(group, joined, words.map(lambda word: [word])), max_size=4)
    asks_help = {"-h", "--help"}  # prints, and exits with 0
    return groups.map(lambda gs: [w for g in gs for w in g]).filter(lambda a: not asks_help & {*a})


def checked(make):
    """What ``make`` returns; or None for a ``UserError`` of one line that says something."""
    try:
        return make()
    except UserError as error:
        line = str(error)
    assert len(line) > 8
    return None


def survives_its_flags(config):
    """The configuration is what its own flags make of it, and validates again."""
    again = parser.parse(type(config), parser.to_flags(asdict(config)), takes_file=False)
    assert again == config


@pytest.mark.parametrize("config_class", CONFIGS)
@without_deadline
@given(data=st.data())
def test_any_argv(config_class, data):
    required = parser.to_flags(REQUIRED.get(config_class, {}))
    argv = required + data.draw(argvs(config_class))
    config = checked(lambda: parser.parse(config_class, argv, takes_file=False))
    if config is not None:
        survives_its_flags(config)


@pytest.mark.parametrize("config_class", CONFIGS)
@without_deadline
@given(data=st.data())
def test_any_values_of_fields(config_class, data):
    """As a notebook sets them: what validates is of the right type, and survives its flags."""
    values = REQUIRED.get(config_class, {}) | data.draw(field_values(config_class))

    def make():
        config = config_class(**values)
        config.validate()
        return config

    config = checked(make)
    if config is not None:
        survives_its_flags(config)


@pytest.mark.parametrize("config_class", STEPS)
@without_deadline
@given(data=st.data())
def test_any_yaml_as_config(config_class, data, tmp_path):
    keys = st.one_of(st.sampled_from(names_of(config_class)), words)
    tree = data.draw(
        st.one_of(field_values(config_class), st.dictionaries(keys, anything, max_size=3), anything)
    )
    required = parser.to_flags(REQUIRED.get(config_class, {}))
    argv = [*required, "--config", written(tmp_path, tree)]
    config = checked(lambda: parser.parse(config_class, argv))
    if config is not None:
        survives_its_flags(config)


@without_deadline
@given(data=st.data())
def test_any_yaml_as_recipe(data, tmp_path):
    """And what a good one plans validates, step by step."""
    sections = {
        "model": st.dictionaries(st.sampled_from(["actor_model", "reward_model"]), anything),
        "common": field_values(SFTConfig),
        "step1": field_values(SFTConfig),
        "step2": field_values(RewardConfig),
        "step3": field_values(RLHFConfig),
        "launch": st.dictionaries(st.sampled_from(["num_nodes", "num_gpus"]), anything),
        "summary": anything,
    }
    some = st.fixed_dictionaries({}, optional=sections)
    argv = ["--recipe", written(tmp_path, data.draw(st.one_of(some, anything)))]
    argv += ["--output-dir", str(tmp_path / "out"), "--dry-run"]

    def plan():
        config, groups = recipe.parse_args(argv)
        return run_plan.plan(config, groups, ROOT)

    plan = checked(plan)
    for run, command in plan.commands if plan else ():
        flags = command[next(i for i, w in enumerate(command) if w.endswith("main.py")) + 1 :]
        survives_its_flags(parser.parse(run.step.config_class, flags))
    assert not (tmp_path / "out").exists()


@without_deadline
@given(data=st.data())
def test_any_bytes_as_config(data, tmp_path):
    path = tmp_path / "any.yaml"
    path.write_bytes(data.draw(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(_utf8))))
    checked(lambda: parser.parse(SFTConfig, ["--config", str(path)]))


@without_deadline
@given(data=st.data())
def test_any_sampling_params(data):
    values = data.draw(field_values(SamplingParams))
    params = checked(lambda: SamplingParams(**values))
    if params is not None:
        assert params.max_new_tokens >= 1
        assert params.end_ids((0,)) == {*params.stop_token_ids} | ({0} - {*[0] * params.ignore_eos})


def written(folder: Path, tree) -> str:
    path = folder / "random.yaml"
    path.write_text(yaml.dump(tree), encoding="utf-8", errors="surrogatepass")
    return str(path)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
