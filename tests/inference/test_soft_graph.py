"""Captured decode steps hold no host value: traces of them replay to the same answers."""

import pytest
import torch
from families import CONFIGS, engine
from soft_graph import operators_only, soft_capture

from dschat.inference import SamplingParams, cuda_graphs
from dschat.inference.decode_state import DecodeState
from dschat.inference.model.attention import Decodes

PROMPTS = [[(5 * i + j) % 50 + 3 for j in range(n)] for i, n in enumerate([5, 17, 1, 30, 9])]
SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=4)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LAYOUTS = {"whole": {}, "pages": {"page_size": 4, "max_num_seqs": 3}}
QUICK = {("llama", "pages")}


def answers(module, capture, prompts, sampling, **knobs):
    """The rollout, and the graphs that made it (None: there were none)."""
    with operators_only():
        made = engine(module, **knobs)
        made._capture = capture
        return made.generate(prompts, sampling), made._runner._graphs


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
        for name in CONFIGS
        for layout in LAYOUTS
    ],
)
def test_replayed_traces_draw_the_same(name, layout, module_of):
    module, knobs = module_of(name), LAYOUTS[layout]
    expected, none = answers(module, None, PROMPTS, SAMPLING, **knobs)
    traced, graphs = answers(module, soft_capture, PROMPTS, SAMPLING, **knobs)
    assert none is None
    assert graphs.num_captured > 0
    assert not graphs.failed
    assert traced.token_ids == expected.token_ids
    for mine, theirs in zip(traced.logprobs, expected.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def plant(monkeypatch, lengths_of):
    """Make captured steps read their lengths by ``lengths_of(positions, longest)``."""
    longest, enter, launch = [1], DecodeState.enter, DecodeState.launch

    def entered(self, sequences, *rest):
        longest[0] = 1 + max(s.computed for s in sequences)
        enter(self, sequences, *rest)

    def launched(self, replay):
        launch(self, replay)
        longest[0] += 1

    def faulty(count, lengths, *rest, **options):
        return Decodes(count, lengths_of(lengths - 1, longest[0]), *rest, **options)

    monkeypatch.setattr(DecodeState, "enter", entered)
    monkeypatch.setattr(DecodeState, "launch", launched)
    monkeypatch.setattr(cuda_graphs, "Decodes", faulty)


def test_a_planted_host_number_draws_other_tokens(module_of, monkeypatch):
    """One sequence's length as the host knows it is right, until it is frozen."""
    module = module_of("llama")
    expected, _ = answers(module, None, PROMPTS[1:2], GREEDY)
    plant(monkeypatch, lambda positions, longest: torch.full_like(positions, longest))
    unfrozen, _ = answers(module, lambda step: step, PROMPTS[1:2], GREEDY)
    plant(monkeypatch, lambda positions, longest: torch.full_like(positions, longest))
    frozen, graphs = answers(module, soft_capture, PROMPTS[1:2], GREEDY)
    assert unfrozen.token_ids == expected.token_ids
    assert graphs.num_captured == 1
    assert frozen.token_ids != expected.token_ids


def test_a_planted_read_fails(module_of, monkeypatch):
    module = module_of("llama")
    plant(monkeypatch, lambda positions, longest: positions + positions.sign().max().item())
    _, graphs = answers(module, soft_capture, PROMPTS[1:2], GREEDY)
    assert graphs.failed
    assert graphs.num_captured == 0
