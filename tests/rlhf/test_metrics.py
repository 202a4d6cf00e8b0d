"""Rates of generation over ranks of which some were idle."""

from types import SimpleNamespace

import pytest

from dschat.hybrid.rollout_form import Refresh
from dschat.inference.stats import GenerationStats
from dschat.rlhf import metrics


@pytest.mark.parametrize(
    ("theirs", "prefill", "decode"),
    [
        ((0, 0.0, 0, 0.0), 50.0, 20.0),  # idle: the rate of this rank
        ((100, 2.0, 60, 3.0), 100.0, 40.0),  # as fast as this one
        ((100, 4.0, 60, 6.0), 50.0, 20.0),  # as slow as both in turn
    ],
)
def test_rates_are_all_tokens_by_the_time_of_the_busiest(theirs, prefill, decode, monkeypatch):
    ours = GenerationStats(prefill_tokens=100, prefill_s=2.0, decode_tokens=60, decode_s=3.0)
    tokens, seconds = theirs[::2], theirs[1::2]

    def sums(mine):
        other = dict(zip(("prefill_tokens", "decode_tokens"), tokens, strict=True))
        return {name: value + other.get(name, 0) for name, value in mine.items()}

    ranks = SimpleNamespace(
        world_size=lambda: 2,
        sum_named=sums,
        gather_objects=lambda mine: [mine, tuple(seconds)],
    )
    monkeypatch.setattr(metrics, "dist", ranks)
    monkeypatch.setattr(metrics, "InferenceEngine", SimpleNamespace)
    engine = SimpleNamespace(
        stats=ours,
        group=SimpleNamespace(size=1),
        cache=SimpleNamespace(keeps_prefixes=False),
        speculation=None,
    )
    found = metrics.generation_metrics(Refresh(), engine)
    assert found["throughput/prefill_tokens_per_s"] == pytest.approx(prefill)
    assert found["throughput/decode_tokens_per_s"] == pytest.approx(decode)
