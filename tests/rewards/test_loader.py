"""Specs, callables and arguments become named, weighted rewards; errors are one line."""

import functools
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dschat.config import UserError
from dschat.rewards.call import rebuilt_function
from dschat.rewards.library import ExactMatch, RegexMatch
from dschat.rewards.loader import load_reward_functions
from dschat.rewards.samples import Samples

SCORES = """
from dataclasses import dataclass
from beside import BONUS

def score(answers, bonus=0.0, pattern: str = ""):
    return [BONUS + bonus] * len(answers)

async def later(answers):
    return [0.0] * len(answers)

@dataclass
class Longer:
    than: int = 0
    def __call__(self, answers):
        return [float(len(a) > self.than) for a in answers]

class NotCallable: pass

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: reward files, good and bad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    texts = {
        "scores.py": SCORES,
        "beside.py": "BONUS = 2",
        "pack/__init__.py": "",
        "pack/mod.py": "def f(answers): return [5] * len(answers)",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def load(*specs, given=(), args=()):
    return load_reward_functions(specs, given, args, {"reward_model"})


def test_specs_names_and_weights(folder):
    def score(answers):
        return [0.0]

    rewards = load(
        "scores.py:score",
        f"{folder}/scores.py:score:0.5",
        "pack.mod:f:-2",
        "scores.py:later:0",
        "exact_match:1e-1",
        given=[score, (score, 3), "length:7", ("scores.py:Longer:2", 4), functools.partial(score)],
        args=["length.target=64"],
    )
    assert [(p.name, p.weight) for p in rewards] == [
        ("score", 1),
        ("score_2", 0.5),
        ("f", -2),
        ("later", 0),
        ("exact_match", 0.1),
        ("score_3", 1),
        ("score_4", 3),
        ("length", 7),
        ("Longer", 8),
        ("score_5", 1),
    ]
    assert [p.name for p in rewards if p.is_async] == ["later"]
    assert rewards[0].function(answers=["a"]) == [2]  # it imports the file beside it
    assert rewards[0].function is rewards[1].function  # a file is imported once
    assert rewards[2].function(answers=["a", "b"]) == [5, 5]


def test_names_that_metrics_can_have():
    class ShortAnswers:
        def __call__(self, answers):
            return [0.0]

    def reward_model(answers):
        return [0.0]

    async def wait(answers):
        return [0.0]

    class Waits:
        async def __call__(self, answers):
            return [0.0]

    rewards = load(given=[ShortAnswers(), reward_model, lambda answers: [0.0], wait, Waits()])
    names = ["short_answers", "reward_model_2", "lambda", "wait", "waits"]
    assert [p.name for p in rewards] == names
    assert [p.is_async for p in rewards] == [False, False, False, True, True]


def test_arguments(folder):
    """Bound to a function, passed to a class's constructor; YAML unless declared str."""
    first, second, longer = load(
        "scores.py:score",
        "scores.py:score",
        "scores.py:Longer",
        args=["score.bonus=1.5", "score_2.pattern=#### (\\d+): [1]", "Longer.than=1"],
    )
    assert first.bound == {"bonus": 1.5}
    assert first.sources([]) == {"answers": "answers"}
    assert second.bound == {"pattern": "#### (\\d+): [1]"}
    assert longer.function(answers=["a", "ab"]) == [0, 1]


def test_arguments_from_columns():
    (reward,) = load("exact_match", args=["exact_match.reference=@gold"])
    assert reward.sources(["gold", "reference"]) == {"answers": "answers", "reference": "gold"}
    with pytest.raises(UserError, match="needs the column gold, which the data lacks .*other"):
        reward.sources(["other"])


def test_arguments_from_paths_into_columns():
    """As `--columns` takes them: verl's ground truth, for a function that is not verl's."""
    (reward,) = load("exact_match", args=["exact_match.reference=@reward_model.ground_truth"])
    sources = reward.sources(["reward_model"])
    assert sources == {"answers": "answers", "reference": "reward_model.ground_truth"}
    rules = [{"ground_truth": "1", "style": "rule"}, {"ground_truth": None}, None]
    samples = Samples(["p"] * 3, list("123"), [[1]] * 3, [[1]] * 3, ["stop"] * 3)
    samples.columns = {"reward_model": rules}
    assert samples.arguments(sources)["reference"] == ["1", None, None]
    samples.columns["reward_model.ground_truth"] = list("abc")  # a column of this very name
    assert samples.arguments(sources)["reference"] == ["a", "b", "c"]


def ours(prompts, answers, prompt_ids, answer_ids, finish_reasons, tests, level=1): ...
def trls(completions, completion_ids, **kwargs): ...
def by_reference(answers, reference): ...


def arguments_of(function, given):
    (reward,) = load(given=[function])
    return given.arguments(reward.sources(given.columns))


def test_arguments_follow_the_signature(samples):
    given = samples(2, tests=[8, 9], solution=["r", "s"], target=["x", "y"])
    given.prompts[1] = "p1"
    assert arguments_of(ours, given) == {
        "prompts": ["p0", "p1"],
        "answers": ["a0", "a1"],
        "prompt_ids": [[0], [0]],
        "answer_ids": [[0], [0, 1]],
        "finish_reasons": ["length", "stop"],
        "tests": [8, 9],
    }
    assert arguments_of(by_reference, given) == {"answers": ["a0", "a1"], "reference": ["r", "s"]}


def test_a_function_of_trl_gets_all(samples):
    got = arguments_of(trls, samples(2, solution=["r", "s"]))
    assert set(got) == {
        *("prompts", "completions", "answers", "prompt_ids", "completion_ids", "answer_ids"),
        *("finish_reasons", "solution", "prompt_messages"),
    }
    assert got["completions"] == got["answers"] == ["a0", "a1"]
    assert got["completion_ids"] == [[0], [0, 1]]


def test_the_reference_is_the_first_of_its_columns():
    (reward,) = load(given=[by_reference])
    for columns, expected in [
        (["answer", "reference", "solution"], "reference"),
        (["answer", "solution"], "solution"),
        (["target", "answer"], "answer"),
        (["ground_truth"], "ground_truth"),
    ]:
        assert reward.sources(columns)["reference"] == expected
    with pytest.raises(UserError, match=r"column reference or solution .*\(it has: a, b\)"):
        reward.sources(["b", "a"])


def test_another_process_makes_the_same(folder):
    given = [re.escape, RegexMatch(pattern="{.*}"), ExactMatch(pattern="a(b)")]
    rewards = load("scores.py:Longer", given=given, args=["Longer.than=1"])
    longer, escape, braces, match = (rebuilt_function(*reward.recipe()) for reward in rewards)
    assert longer(answers=["a", "ab"]) == [0, 1]
    assert escape is re.escape
    assert braces(answers=["{}", "[]"]) == [1, 0]
    assert match(answers=["ab", "b"], reference=["b", "b"]) == [1, 0]


def abs_of(answers):
    return [0.0] * len(answers)


@dataclass
class Needs:
    what: int

    def __call__(self, answers):
        return [0.0]


@pytest.mark.parametrize(
    ("spec", "args", "words"),
    [
        ("scores.py", [], "is not a ready-made function .* file.py:name"),
        ("scores.py:number", [], "--reward_fn scores.py:number is a int, not a function"),
        ("scores.py:NotCallable", [], "whose instances are not callable; give it __call__"),
        ("scores.py:score", ["scor.bonus=1"], r"no --reward_fn is called scor \(score\)"),
        ("scores.py:score", ["score.bonu=1"], "it takes no bonu; it takes: bonus, pattern"),
        ("scores.py:score", ["score.bonu=@x"], "it takes no bonu; it takes: answers, bonus"),
        ("scores.py:score", ["score.answers=1"], "answers comes from the samples"),
        ("scores.py:score", ["score.bonus=[1"], "score.bonus=.*the value is not YAML"),
        ("length", [], "--reward_fn length: takes either target or max, above 0"),
        ("length", ["length.target=4", "length.max=4"], "takes either target or max"),
        ("regex_match", [], "is missing its pattern: --reward_args regex_match.pattern"),
        ("regex_match", ["regex_match.pattern=(a"], r"pattern=\(a: invalid regular expression"),
        ("exact_match", ["exact_match.pattern=(a"], r"pattern=\(a: invalid regular expression"),
        ("math_equal", ["math_equal.limit_s=0"], "math_equal.limit_s=0 must be above 0"),
    ],
)
def test_errors_of_specs_and_arguments_are_one_line(folder, spec, args, words):
    with pytest.raises(UserError, match=words) as caught:
        load(spec, args=args)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "reward_fns: 3 is not a function, spec or"),
        (SimpleNamespace(save_pretrained=None), "SimpleNamespace is a model; name its folder as"),
        ((abs_of, "2"), "the weight '2' of .* is not a number"),
        ((abs_of, float("inf")), "the weight inf is not a finite number"),
        ("exact_mach", "reward_fns 'exact_mach' is not a ready-made function"),
        (Needs, "cannot be constructed: it raised TypeError: .*'what'; see --reward_args"),
    ],
)
def test_errors_of_callables(given, words):
    with pytest.raises(UserError, match=words):
        load(given=[given])


def test_one_function_needs_no_list(rewards):
    for given in (abs_of, [abs_of], (abs_of,)):
        assert rewards(given).names == ["abs_of"]
    assert rewards("exact_match").names == ["exact_match"]
