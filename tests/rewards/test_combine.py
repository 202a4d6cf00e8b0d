"""The weighted sum of sources, normalized with running statistics, against NumPy."""

import numpy as np
import pytest
import torch

from dschat.rewards.scoring import RunningScale, SourceScores, combine


def test_sources_add_up_by_their_weights():
    sources = [
        SourceScores("reward_model", 2.0, [1.0, -3.0, 0.5, 1.0]),
        SourceScores("rule", -0.5, [4.0, float("nan"), None, 0.0]),
        SourceScores("steps", 3.0, [[0.5], [1, 0], [1, 1], []]),
        SourceScores("more", 1.0, [[0, 1], 0.0, [0], [0]]),
    ]
    scores, by_token = combine(sources, None)
    assert scores.dtype == torch.float64
    assert scores.tolist() == pytest.approx([2 - 2 + 1.5 + 1, float("nan"), 7, 2], nan_ok=True)
    assert by_token == [[1.5, 1], [3, 0], [3, 3], [0]]
    assert combine(sources[:2], None)[1] is None


@pytest.mark.parametrize("normalize", [False, True])
def test_a_source_without_weight_adds_nothing(normalize):
    """0 times NaN is NaN."""
    logged = SourceScores("logged", 0.0, [[float("nan")], [1.0]])
    sources = [SourceScores("rule", 2.0, [-1.0, 1.0]), logged]
    scores, by_token = combine(sources, RunningScale() if normalize else None)
    assert scores.tolist() == [-2, 2]
    assert by_token is None


def test_normalized_scores_against_numpy():
    """Mean and deviation are those of all scores so far, the current ones included."""
    rng = np.random.default_rng(0)
    rounds = [rng.normal(1e4, 3, 7), rng.normal(1e4, 5, 2), rng.normal(0, 1, 5)]
    scale = RunningScale()
    for number, values in enumerate(rounds):
        seen = np.concatenate(rounds[: number + 1]).astype(np.float32).astype(np.float64)
        steps = [[float(v) / 2] * 2 for v in values]
        sources = [
            SourceScores("a", 2.0, values.tolist()),
            SourceScores("b", 1.0, steps),
            SourceScores("constant", 5.0, [0.1] * len(values)),
        ]
        scores, by_token = combine(sources, scale)
        normal = (values.astype(np.float32) - seen.mean()) / seen.std()
        np.testing.assert_allclose(scores.numpy(), 3 * normal, rtol=1e-5, atol=1e-6)
        # Tokens are scaled; the shift belongs to the answer.
        np.testing.assert_allclose(by_token, np.array(steps) / seen.std(), rtol=1e-6)


def test_none_does_not_change_the_statistics():
    scale = RunningScale()
    scores, _ = combine([SourceScores("a", 1.0, [1.0, None, 3.0, np.nan])], scale)
    assert scores.tolist() == pytest.approx([-1, 0, 1, np.nan], nan_ok=True)
    assert scale.state_dict() == {"a": [2, 2, 2]}


def test_statistics_resume_from_a_saved_state():
    scale, resumed = RunningScale(), RunningScale()
    combine([SourceScores("a", 1.0, [1.0, 5.0])], scale)
    state = scale.state_dict()
    assert state == {"a": [2, 3, 8]}
    resumed.load_state_dict(state)
    later = [combine([SourceScores("a", 1.0, [7.0, 2.0])], one)[0] for one in (scale, resumed)]
    assert later[0].tolist() == later[1].tolist()
    assert scale.state_dict() == resumed.state_dict() != state
    nothing = SourceScores("a", 1.0, [])
    assert combine([nothing], scale)[0].shape == (0,)
    assert scale.state_dict() == resumed.state_dict()
