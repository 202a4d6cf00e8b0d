"""Faults planted in the device's decode loop: each one changes the tokens of a small rollout."""

from contextlib import nullcontext

import pytest
from captures import LateQueue, again, use
from families import PROMPTS
from soft_graph import soft_capture

from dschat.inference import SamplingParams, sampler
from dschat.inference.captured_core import CapturedCore
from dschat.inference.decode_state import DecodeState
from dschat.inference.sampling import uniforms
from dschat.inference.scheduler import Scheduler


def frozen_seed(monkeypatch):
    enter, seeds = CapturedCore._enter, []

    def remember(self, sequences):
        seeds.append(sequences[0].request.sampling.seed)
        return enter(self, sequences)

    monkeypatch.setattr(CapturedCore, "_enter", remember)
    monkeypatch.setattr(
        sampler, "uniforms", lambda seed, *key: uniforms(seeds[-1] if seeds else seed, *key)
    )


def warm_up_counts(monkeypatch):
    monkeypatch.setattr(DecodeState, "asleep", lambda self: nullcontext())


def no_page_ahead(monkeypatch):
    monkeypatch.setattr(Scheduler, "extend", lambda self, sequence: True)


def page_in_the_wrong_place(monkeypatch):
    set_page = DecodeState.set_page
    monkeypatch.setattr(
        DecodeState, "set_page", lambda self, row, i, page: set_page(self, row, i - 1, page)
    )


def read_one_off(monkeypatch):
    read = DecodeState.read

    def later(self):
        read(self)
        return self._host_ring[self._read % len(self._host_ring)]

    monkeypatch.setattr(DecodeState, "read", later)


def one_step_ahead(monkeypatch):
    enter = DecodeState.enter

    def longer(self, sequences, *rest):
        for s in sequences:
            s.computed += 1
        enter(self, sequences, *rest)
        for s in sequences:
            s.computed -= 1

    monkeypatch.setattr(DecodeState, "enter", longer)


def does_not_wait(monkeypatch):
    mark = LateQueue.mark
    monkeypatch.setattr(LateQueue, "mark", lambda self: mark(self) and (lambda: None))


@pytest.mark.parametrize(
    "fault",
    [
        frozen_seed,
        warm_up_counts,
        no_page_ahead,
        page_in_the_wrong_place,
        read_one_off,
        one_step_ahead,
        does_not_wait,
    ],
)
def test_a_planted_fault_shows(fault, monkeypatch, engines):
    """What shows: with as little as two rows and two rollouts on one graph."""
    capture = soft_capture if fault in (frozen_seed, warm_up_counts) else again
    plain, graphs = engines("opt", capture, max_num_seqs=2, page_size=4)
    use(monkeypatch, queue=LateQueue() if fault is does_not_wait else None)
    fault(monkeypatch)
    samplings = [SamplingParams(max_new_tokens=20, seed=s, ignore_eos=True) for s in (1, 2)]
    expected = [plain.generate(PROMPTS[3:5], s).token_ids for s in samplings]
    assert [graphs.generate(PROMPTS[3:5], s).token_ids for s in samplings] != expected


@pytest.mark.parametrize("capture", [soft_capture, again])
def test_without_a_fault_nothing_shows(capture, monkeypatch, engines):
    plain, graphs = engines("opt", capture, max_num_seqs=2, page_size=4)
    use(monkeypatch, queue=LateQueue())
    samplings = [SamplingParams(max_new_tokens=20, seed=s, ignore_eos=True) for s in (1, 2)]
    expected = [plain.generate(PROMPTS[3:5], s).token_ids for s in samplings]
    assert [graphs.generate(PROMPTS[3:5], s).token_ids for s in samplings] == expected
