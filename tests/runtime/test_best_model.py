"""The best model: by which evaluation it is kept, and what a resumed run compares with."""

import json
import math

import pytest

from dschat.config import SFTConfig
from dschat.runtime.best_model import BestModel

LEADING = "eval/loss"


def keeper(folder, keep_best="auto"):
    """A `BestModel` whose model is a number in a file, and a function that sets the next one."""
    now = []

    def save(place):
        place.mkdir(exist_ok=True)
        (place / "model.safetensors").write_text(str(now[-1]))

    config = SFTConfig(output_dir=str(folder), keep_best=keep_best)
    return BestModel(config, "actor_best", save), now.append


def kept(folder):
    return (folder / "actor_best/model.safetensors").read_text()


@pytest.mark.parametrize(
    ("keep_best", "values", "best"),
    [
        ("auto", [0.5, 0.7, 0.3, 0.3, 0.4], 2),
        ("auto", [math.nan, -0.1, math.nan], 1),
        ("eval/perplexity", [0.5, 0.7, 0.3], 2),
        ("eval/teacher_kl", [0.5, 0.7, 0.3], 2),
        ("eval/accuracy", [0.5, 0.7, 0.7, 0.3], 1),
        ("eval/rewards/accuracies", [math.nan, 0.0, 0.2], 2),
        ("eval/scores/loss", [0.5, 0.7, 0.3], 1),  # a reward function of that name
    ],
)
def test_the_first_of_the_best(keep_best, values, best, tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    model, now = keeper(tmp_path, keep_best)
    name = LEADING if keep_best == "auto" else keep_best
    for number, value in enumerate(values):
        now(number)
        model.take({name: value, "eval/other": -number}, LEADING, f"step {number}")
    assert kept(tmp_path) == str(best)
    last = f"best {name} so far: {values[best]:.4f} at step {best}, saved as {tmp_path}/actor_best"
    assert caplog.messages[-1] == last
    assert model.value == values[best]


def test_what_is_not_kept_has_no_folder(tmp_path):
    """Also where an evaluation lacks the metric: a teacher alone gives no score."""
    model, now = keeper(tmp_path, None)
    now(0)
    model.take({"eval/kl": 1.0}, "eval/score", "iteration 1")
    assert (model.metric, model.value) == ("eval/score", -math.inf)
    assert not any(tmp_path.iterdir())


def test_a_doubtful_run_replaces_by_a_named_metric_alone(tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    for keep_best, expected in (("auto", "0"), (LEADING, "1")):
        model, now = keeper(tmp_path, keep_best)
        for number in (0, 1):
            now(number)
            model.take({LEADING: 1.0 - number}, LEADING, "step 1", is_doubtful=number == 1)
        assert kept(tmp_path) == expected
    assert "eval/loss 0.0000 is not kept: the run has warned" in caplog.messages


@pytest.mark.parametrize(
    ("change", "keep_best", "is_better"),
    [
        (None, "auto", False),
        (None, "eval/accuracy", True),  # another metric
        ("of a branch that is given up", "auto", True),
        ("", "auto", True),  # it is gone
    ],
)
def test_a_resumed_run_compares_with_what_the_folder_has(change, keep_best, is_better, tmp_path):
    model, now = keeper(tmp_path)
    now("first")
    model.take({LEADING: 0.4, "eval/accuracy": 0.9}, LEADING, "step 1")
    values = json.loads(json.dumps(model.state()))
    file = tmp_path / "actor_best/model.safetensors"
    if change:
        file.write_text(change)
    elif change is not None:
        file.unlink()
    resumed, now = keeper(tmp_path, keep_best)
    resumed.restore(values)
    now("resumed")
    resumed.take({LEADING: 0.5, "eval/accuracy": 0.1}, LEADING, "step 2")
    assert kept(tmp_path) == ("resumed" if is_better else "first")
