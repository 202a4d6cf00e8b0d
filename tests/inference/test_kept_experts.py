"""Answers come with the experts that each of their tokens chose, whatever was scheduled."""

import pickle
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from captures import LateQueue, on_graphs, use
from episode_runs import run
from families import DEFAULT_SIZES, PROMPTS, cache_gib, engine
from quick import each_once, some
from rank_threads import on_ranks

from dschat.inference import EngineConfig, SamplingParams
from dschat.inference.generators.hf_generator import module_engine
from dschat.inference.requests.sequence import Request
from dschat.models.routing import routers_of
from dschat.rlhf.rollout_policies import OpenPrompt, advance

SAMPLING = SamplingParams(max_new_tokens=10, n=3, seed=7, stop_token_ids=(3, 5))
LAYOUTS = {
    "whole": {},
    "paged": {"page_size": 4, "max_num_batched_tokens": 11, "max_num_seqs": 5},
    "preempted": {"page_size": 4, "max_num_seqs": 6},
}
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


@torch.no_grad()
def plain_experts(module, ids):
    """Of all tokens but the last, sorted: (T - 1, routers, k)."""
    chosen = []
    hooks = [
        router.register_forward_hook(lambda m, args, output: chosen.append(output[-1]))
        for router in routers_of(module)
    ]
    module(input_ids=torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values


def assert_plain(module, prompts, rollout):
    n = len(rollout) // len(prompts)
    assert rollout.experts is not None
    for i, (answer, experts) in enumerate(zip(rollout.token_ids, rollout.experts, strict=True)):
        expected = plain_experts(module, prompts[i // n] + answer)
        assert torch.equal(experts[:-1].long().sort(-1).values, expected)
        assert (experts[-1] == -1).all()


@pytest.mark.parametrize(
    ("family", "decoder", "layout"),
    some(
        product(FAMILIES, ["blocks", "module"], LAYOUTS),
        [("gpt_oss", "blocks", "preempted")],
    ),
)
def test_they_are_those_of_a_plain_forward(family, decoder, layout, module_of):
    module, sizes = module_of(family), LAYOUTS[layout]
    if layout == "preempted":
        sizes = sizes | {"kv_cache_gib": cache_gib(engine(module, keeps_experts=True), 56)}
    if decoder == "blocks":
        made, scope = engine(module, keeps_experts=True, **sizes), nullcontext
    else:
        sizes = EngineConfig(keeps_experts=True, **DEFAULT_SIZES | sizes)
        made = module_engine(module, sizes)
        scope = made.weights.in_use
    for _ in range(2):  # then with pages of the first call
        with scope():
            rollout = made.generate(PROMPTS, SAMPLING)
        assert_plain(module, PROMPTS, rollout)
        assert (made.stats.preemptions > 0) == (layout == "preempted")


def test_other_ranks_are_not_sent_them():
    request = Request([3], SamplingParams(max_new_tokens=4, n=1), 0)
    request.sequences[0].experts = torch.zeros(4, 2, 2)
    sent = pickle.loads(pickle.dumps(request))
    assert sent.sequences[0].experts is None
    assert sent.sequences[0].request is sent


@pytest.mark.slow
@pytest.mark.usefixtures("operators_of_torch")
@pytest.mark.parametrize(("stops", "queue"), each_once([(), (3, 5)], [None, LateQueue]))
def test_captured_steps_keep_them(stops, queue, monkeypatch, module_of):
    use(monkeypatch, queue=queue and queue())
    module = module_of("qwen3_moe")
    sampling = SamplingParams(10, n=3, seed=7, stop_token_ids=stops, ignore_eos=not stops)
    made = on_graphs(module, keeps_experts=True, page_size=4)
    expected = engine(module).generate(PROMPTS, sampling)
    rollout = made.generate(PROMPTS, sampling)
    assert rollout.token_ids == expected.token_ids
    assert_plain(module, PROMPTS, rollout)


def test_ranks_that_share_weights_keep_their_own(module_of):
    module = module_of("qwen3_moe")

    def work(member):
        mine = PROMPTS[3 * member.rank :][: 3 + 2 * member.rank]
        made = engine(module, group=member, keeps_experts=True)
        return mine, made.generate(mine, SAMPLING, [3 * member.rank + i for i in range(len(mine))])

    for prompts, rollout in on_ranks(2, work):
        assert_plain(module, prompts, rollout)


def test_answers_of_several_calls_and_a_saved_state(module_of):
    """An answer that was complete in the first call keeps its experts, through a state, too."""
    module, prompts = module_of("mixtral"), [OpenPrompt(ids) for ids in PROMPTS]
    made, numbers = engine(module, keeps_experts=True, max_num_seqs=4), list(range(len(PROMPTS)))
    sampling = replace(SAMPLING, stop_token_ids=tuple(range(2, 64, 7)))
    advance(made, prompts, sampling, numbers, wanted=1)
    begun = [p for p in prompts if p.token_ids and not p.is_complete]
    assert any("stop" in p.finish_reasons for p in begun)
    prompts = [OpenPrompt.of_state(p.state()) for p in prompts]
    rollouts = {}
    advance(
        *(made, prompts, sampling, numbers, len(prompts)),
        answered=lambda row, rollout: rollouts.setdefault(row, rollout),
    )
    assert sorted(rollouts) == numbers
    for row, rollout in rollouts.items():
        assert_plain(module, [PROMPTS[row]], rollout)


def test_an_episode_has_those_of_all_its_turns(module_of):
    module = module_of("qwen3_moe")
    episodes = run(engine(module, page_size=4, keeps_experts=True))
    assert any(e.num_turns > 1 for e in episodes)
    for e in episodes:
        expected = plain_experts(module, e.prompt + e.tokens)
        assert torch.equal(e.experts[:-1].long().sort(-1).values, expected)


def test_nothing_is_kept_unless_asked_for(module_of):
    made = engine(module_of("qwen3_moe"))
    assert made.generate(PROMPTS, SAMPLING).experts is None
    assert made.cache.experts_of([0], 1) is None
    dense = engine(module_of("llama"), keeps_experts=True)
    assert dense.generate(PROMPTS, SAMPLING).experts is None
