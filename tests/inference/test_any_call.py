"""Any calls through any door of an engine: the answers that each prompt has alone.

Prompts are generated together, streamed, continued over several calls, or requested with samplings
of their own. Pages are few, sequences preempted, prompts cut into chunks and prefixes found again.
Steps run one by one, or are captured and read late from a device that may compute as late as it
can.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
from captures import LateQueue, again, assert_idle, on_graphs, use
from families import (
    PROMPTS,
    VOCAB,
    assert_same,
    cache_gib,
    engine,
    examples,
    rollout_of,
)
from hypothesis import given
from hypothesis import strategies as st
from quick import slow
from soft_graph import operators_only, soft_capture

from dschat.inference import SamplingParams
from dschat.inference.protocol import Rollout
from dschat.inference.requests.sequence import Request
from dschat.rlhf.rollout_policies import OpenPrompt, advance

FAMILIES = ["llama", "opt", "bloom", "gpt2", "mistral"]
SYSTEM = [(7 * i) % 50 + 3 for i in range(21)]  # prompts that begin alike
HALF = tuple(range(0, VOCAB, 2))  # stop ids: an answer hardly lives to its eighth token
KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 7, "temperature": 1.3},
    {"top_p": 0.8, "temperature": 0.7},
    {"top_k": 9, "top_p": 0.7},
    {"min_p": 0.05, "top_p": 0.95},
]


class Asked(NamedTuple):
    """The arguments of a `Request`."""

    ids: list[int]
    sampling: SamplingParams
    number: int
    limit: int
    first_sample: int = 0
    first_position: int = 0


def alone(made, one):
    core, request = made.core(), Request(*one)
    core.add(request)
    assert all(event.sequence.request is request for event in core.events())
    return request.rollout()


def generate(made, asked, draw):
    prompts, samplings, numbers, limits, *_ = map(list, zip(*asked, strict=True))
    return made.generate(prompts, samplings[0], numbers, limits)


def stream(made, asked, draw):
    """The tokens alone."""
    return Rollout([list(made.stream(one.ids, one.sampling)) for one in asked])


def partly(made, asked, draw):
    """Each call stops when some more prompts are complete."""
    prompts, numbers = [OpenPrompt(one.ids) for one in asked], [one.number for one in asked]
    while rest := sum(not prompt.is_complete for prompt in prompts):
        wanted = len(prompts) - rest + draw(st.integers(1, rest))
        advance(made, prompts, asked[0].sampling, numbers, wanted, draw(st.integers(0, 3)))
        assert sum(prompt.is_complete for prompt in prompts) >= wanted
        assert_idle(made)
    return rollout_of(prompts)


def requests(made, asked, draw):
    """They arrive while others run."""
    core, added = made.core(), []
    for one in asked:
        added.append(Request(*one))
        core.add(added[-1])
        for _ in range(draw(st.integers(0, 3))):
            if core.has_work:
                core.step()
    assert all(event.sequence.request in added for event in core.events())
    return Rollout.joined(request.rollout() for request in added)


DOORS = [generate, generate, stream, partly, requests]


@st.composite
def samplings(draw):
    return SamplingParams(
        max_new_tokens=draw(st.sampled_from([5, 12, 16])),
        seed=draw(st.integers(0, 9)),
        n=draw(st.integers(1, 3)),
        min_new_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        stop_token_ids=draw(st.sampled_from([(), (3, 17, 40), HALF])),
        ignore_eos=draw(st.booleans()),
        **draw(st.sampled_from(KINDS)),
    )


PROMPT = st.one_of(
    st.sampled_from(PROMPTS),
    st.builds(
        lambda count, rest: SYSTEM[:count] + rest,
        st.integers(0, 21),
        st.lists(st.integers(3, 5), min_size=1, max_size=6),
    ),
)


@st.composite
def calls(draw, door):
    """What one call asks for, in the words of its door."""
    prompts = draw(st.lists(PROMPT, min_size=1, max_size=6))
    common, asked = draw(samplings()), []
    for place, ids in enumerate(prompts):
        sampling = draw(samplings()) if door is requests else common
        number, limit = draw(st.integers(0, 9)), sampling.max_new_tokens
        if door in (generate, requests):
            limit = draw(st.sampled_from([limit, limit, 1, 2, 7]))
        if door is stream:
            sampling, number = replace(sampling, n=1), 0
        else:
            number += 10 * place
        first = [draw(st.sampled_from([0, 0, 1, 6])) for _ in range(2 * (door is requests))]
        asked.append(Asked(ids, sampling, number, limit, *first))
    return asked


@st.composite
def knobs(draw, plain):
    sizes = {
        "page_size": draw(st.sampled_from([None, 1, 3, 4, 7, 16])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 8, 100])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 5, 7, 16, 2048])),
    }
    if sizes["page_size"] is not None and draw(st.booleans()):
        sizes["kv_cache_gib"] = cache_gib(plain, draw(st.integers(64, 150)))
    return sizes


def check(module, capture, draw):
    """Up to three calls of one engine."""
    plain = engine(module)
    sizes = draw(knobs(plain))
    made = on_graphs(module, capture, **sizes) if capture else engine(module, **sizes)
    for _ in range(draw(st.integers(1, 3))):
        door = draw(st.sampled_from(DOORS))
        asked = draw(calls(door))
        expected = [alone(plain, one) for one in asked]
        with pytest.MonkeyPatch.context() as patch:
            lag, late = draw(st.sampled_from([0, 1, 2])), draw(st.booleans())
            use(patch, lag, LateQueue() if late else None, fewest_tokens=8)
            got = door(made, asked, draw)
        expected = Rollout.joined(expected)
        if door is stream:
            assert got.token_ids == expected.token_ids
        else:
            assert_same(got, expected)
        assert_idle(made)


@examples(4, 1500)
@given(data=st.data())
@pytest.mark.parametrize("capture", [again, *slow([None])], ids=["captured", "eager"])
def test_any_call_has_the_answers_of_each_prompt_alone(capture, module_of, data):
    with operators_only():
        check(module_of(data.draw(st.sampled_from(FAMILIES))), capture, data.draw)


@pytest.mark.slow
@examples(40, 40)
@given(data=st.data())
def test_any_call_with_frozen_operators(module_of, data):
    with operators_only():
        check(module_of(data.draw(st.sampled_from(FAMILIES))), soft_capture, data.draw)
