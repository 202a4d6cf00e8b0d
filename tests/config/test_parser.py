"""Flags and YAML files into dataclasses, and error messages."""

import re
from dataclasses import fields

import pytest
import yaml
from python_process import ROOT, python

from dschat.chat.load import ChatConfig
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.data import ShowConfig
from dschat.launch.recipe import TrainConfig

MODELS = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "b"]
CONFIGS = (SFTConfig, RewardConfig, RLHFConfig)


def test_flags_round_trip():
    """Awkward values survive an argv, with their types; test_properties.py has random ones."""
    values = {
        "output_dir": "",
        "data_path": ["a b", "c=d"],
        "columns": ["prompt=-x"],
        "adam_betas": [0.5, 1e-9],
        "learning_rate": -1e-5,
        "seed": -3,
        "num_train_epochs": 1,
        "eot_token": "-x",
        "chat_template": "true",
        "dropout": None,
        "gradient_checkpointing": True,
        "chat_template_kwargs": {"a": None, "b c": False, "d": "{}"},
    }
    given = {name: value for name, value in values.items() if value is not None}
    assert parser.given(SFTConfig, parser.to_flags(values)) == given
    assert parser.given(SFTConfig, parser.to_flags({})) == {}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--kl_coef", "0.05"], "kl_coef", 0.05),
        (["--kl-coef=0.05"], "kl_coef", 0.05),
        (["--kl-ctl", "5e-2"], "kl_coef", 0.05),  # DeepSpeed-Chat's name, with dashes
        (["--reward-model-name-or-path", "r"], "reward_model_name_or_path", "r"),
        (["--data-path", "x-y.json:2", "b"], "data_path", ["x-y.json:2", "b"]),
        (["--enable_ema"], "enable_ema", True),
        (["--enable-ema", "true"], "enable_ema", True),
        (["--enable_ema", "--no-enable-ema"], "enable_ema", False),
        (["--enable_ema", "false"], "enable_ema", False),
        (["--no_whiten_advantages"], "whiten_advantages", False),
        (["--whiten-advantages", "no"], "whiten_advantages", False),
        (["--kl_target", "6"], "kl_target", 6.0),
    ],
)
def test_spellings(argv, name, value):
    config = parser.parse(RLHFConfig, MODELS + argv)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "my.yaml").write_text(text)
        return str(tmp_path / "my.yaml")

    return write


def test_file_then_flags(yaml_file):
    # YAML 1.1 reads 2e-4 as a string, and true and lists as themselves.
    text = "learning_rate: 2e-4\nseed: 5\noffload: true\ndata-path: [a.json, b]\ndropout: null\n"
    config = parser.parse(SFTConfig, ["--config", yaml_file(text), "--seed", "6"])
    assert config == SFTConfig(
        learning_rate=2e-4, seed=6, offload=["auto"], data_path=["a.json", "b"], dropout=None
    )


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_words_that_yaml_reads_as_truth_values(yaml_file, word):
    argv = ["--config", yaml_file(f"packing: {word}\n")]
    assert parser.parse(SFTConfig, argv).packing == word


def test_flag_equal_to_default_wins_over_file(yaml_file):
    argv = ["--config", yaml_file("seed: 5\noffload: true\n"), "--seed", "1234", "--no_offload"]
    assert parser.parse(SFTConfig, argv) == SFTConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leraning_rate: 1", "unknown key leraning_rate; did you mean learning_rate?"),
        ("seed: many", "--seed 'many' is not a whole number"),
        ("seed: [1, 2]", "seed takes one value, not a list"),
        ("seed: 2020-13-01", "broken YAML: month must be in 1..12"),
        ("seed: {a: 1}", "seed takes a value, not a mapping"),
        ("chat_template_kwargs: {on: 2026-11-28}", "chat_template_kwargs has a key or value that"),
        ("chat_template_kwargs: {~: 1}", "chat_template_kwargs has a key or value that"),
        ("a: 1\nb: [", "broken YAML at line"),
        ("seed: 1\n\nseed: 2", "line 3: duplicate key seed, also at line 1; leave one out"),
        ("x:\n  a-b: 1\n  a_b: 2", "line 3: duplicate key a_b, also at line 2; leave one out"),
        ("- a", "must be a mapping"),
        *(
            (text, f"broken YAML at line 2: {value} is another number in YAML 1.1; quote it")
            for value in ("010", "-0_7", "12:30:45", "1:30.5")
            for text in (f"a: b\nseed: {value}", f"a:\n- {value}", f"a: b\nx: {{{value}: 1}}")
        ),
    ],
)
def test_mistakes_in_a_file_name_it(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(UserError) as error:
        parser.parse(SFTConfig, ["--config", path])
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_that_all_read_alike(yaml_file):
    values = {"a": 10, "b": 0, "c": 0.5, "d": "010", "e": "12:30:45", "f": "09", "g": 16, "h": -1}
    text = "a: 10\nb: 0\nc: 0.5\nd: '010'\ne: \"12:30:45\"\nf: 09\ng: 0x10\nh: -1\ni: a:1\n"
    assert parser.read_yaml(yaml_file(text)) == values | {"i": "a:1"}
    assert parser.read_yaml(yaml_file(yaml.safe_dump(values))) == values


def test_a_key_may_override_a_merged_one(yaml_file):
    text = "one: &one {a: 1, b: 2}\ntwo: &two {<<: *one, a: 3}\nthree: {<<: *two, b: 4}\n"
    assert parser.read_yaml(yaml_file(text)) == {
        "one": {"a": 1, "b": 2},
        "two": {"a": 3, "b": 2},
        "three": {"a": 3, "b": 4},
    }


def test_of_several_merged_mappings_the_first_wins(yaml_file):
    """As YAML's merge key says; PyYAML 6.0.4, which pyproject.toml excludes, takes the last."""
    text = "a: &a {seed: 1}\nb: &b {<<: *a, seed: 3}\nc: {<<: [*a, *b]}\n"
    assert parser.read_yaml(yaml_file(text))["c"] == {"seed": 1}


def test_every_field_has_help_and_its_own_name():
    for config_class in CONFIGS:
        assert all(f.metadata.get("help") for f in fields(config_class))
        assert {f.name for f in fields(config_class)} <= parser.flag_names(config_class)


def help_of(config_class, *argv, capsys) -> str:
    with pytest.raises(SystemExit):
        parser.given(config_class, argv)
    return capsys.readouterr().out


@pytest.mark.parametrize("config_class", [*CONFIGS, ShowConfig, ChatConfig, TrainConfig])
def test_help_is_short_and_names_the_rest(config_class, capsys):
    """``--help`` is short and names ``--help all``, which has every flag with its default."""
    short = help_of(config_class, "--help", capsys=capsys)
    assert len(short.splitlines()) <= 90
    shown = {f.name for f in fields(config_class) if f.metadata["short"]}
    flags = set(re.findall(r"^  --(\w+)", short, re.MULTILINE))
    assert flags == shown | {"config"}
    whole = help_of(config_class, "-h", "all", capsys=capsys)
    flags = set(re.findall(r"^  --(\w+)", whole, re.MULTILINE))
    assert flags == {f.name for f in fields(config_class)} | {"config"}
    num_more = len(fields(config_class)) - len(shown)
    assert short.splitlines()[-1] == f"--help all shows {num_more} more flags."
    assert "--help all" not in whole


def test_help_has_what_a_first_run_needs(capsys):
    short = help_of(RLHFConfig, "--help", capsys=capsys)
    wanted = "actor_lora_dim eval_steps keep_best lr_scheduler_type num_warmup_steps resume"
    wanted += " reward_fn reward_model_name_or_path save_steps seed"
    assert {name for name in wanted.split() if f"  --{name} " not in short} == set()
    assert "default: output/step1_sft, /step2_reward or" in " ".join(short.split())


def test_help_has_groups_and_defaults(capsys):
    whole = " ".join(help_of(RLHFConfig, "--help", "all", capsys=capsys).split())
    assert "--num_train_epochs N Passes over this step's share of the data. (default: 1)" in whole
    assert "--adam_betas X [X ...] AdamW's beta1 and beta2. (default: 0.9 0.95)" in whole
    titles = ["Step 3: RLHF.", "Algorithm:", "Rollouts:", "Output,", "DeepSpeed:", "Data:"]
    places = [whole.index(f" {title} ") for title in titles]
    assert places == sorted(places)


SCRIPTS = ["train.py", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("step*/main.py"))]


@pytest.mark.parametrize(
    "script",
    [s if s == "train.py" else pytest.param(s, marks=pytest.mark.slow) for s in SCRIPTS],
)
def test_help_loads_nothing_heavy(script):
    source = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules)\n"
        "    sys.exit(stop.code or ' '.join(heavy) or 0)\n"
    )
    done = python("-c", source)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--output_dir" in done.stdout
