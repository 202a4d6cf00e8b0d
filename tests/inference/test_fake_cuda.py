"""The engine on a fake CUDA device: one device, no host reads in captured steps, few operators."""

import dataclasses
from collections import Counter

import pytest
import torch
from fake_cuda import DEVICE, READ, TO_DEVICE, TO_HOST, fake_cuda, fake_engine
from fake_steps import PROMPTS, SAMPLED, decode_step, operators, waits
from families import CONFIGS

WAYS = {
    "eager": {"cuda_graphs": False},
    "graph": {},
    "fp32": {"dtype": torch.float32},
    "pages": {"page_size": 16},
    "borrowed": {"borrowed": "parts"},
    "views": {"borrowed": "adjacent"},
    "chunks": {"max_num_batched_tokens": 7, "page_size": 4},
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# -- every family ----------------------------------------------------------------------------------

QUICK = {("llama", "chunks")}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) if (name, way) in QUICK else slow(name, way) for name in CONFIGS for way in WAYS],
)
def test_every_family_runs_on_one_device(name, way):
    with fake_cuda() as watch:
        made = fake_engine(watch, CONFIGS[name](), **WAYS[way])
        rollout = made.generate(PROMPTS, SAMPLED)
    assert [len(ids) for ids in rollout.token_ids] == [4] * 4
    captured = Counter({name: n for (inside, name), n in watch.counts.items() if inside})
    assert (operators(captured) > 0) == (way != "eager")
    assert waits(captured) == 0


@pytest.mark.parametrize(
    "options",
    [
        slow({"top_p": 0.9, "n": 3}),
        {"min_new_tokens": 4, "stop_token_ids": (60,)},
        slow({"temperature": 0.0}),
        slow({"top_k": 5}),
        slow({"min_p": 0.1, "temperature": 0.5, "stop_token_ids": (60,)}),
    ],
    ids=str,
)
def test_nothing_waits_for_a_decode_step(options):
    """With stop ids, each step's tokens follow it to the host; without, those of all steps."""
    config = CONFIGS["llama"]()
    sampling = dataclasses.replace(SAMPLED, **options)
    captured, around = decode_step(config, sampling=sampling, max_num_seqs=16, page_size=64)
    assert waits(captured) == 0
    assert around == ({"copy_ behind the host": 1} if sampling.stop_token_ids else {})


@pytest.mark.slow
def test_new_pages_follow_without_a_wait():
    captured, around = decode_step(CONFIGS["llama"](), [[5, 6, 7]], page_size=1)
    assert waits(captured) == 0
    assert around == {"copy_ behind the host": 1}


# -- budgets ---------------------------------------------------------------------------------------

# Operators of a layer, counted by hand: norms 2, products 4, the cache's write, keys and values of
# the pages 2, attention, sums 2 and the activation; Llama's rotation (cat, mul, addcmul) and gate
# (mul) besides.
OPT_LAYER, LLAMA_LAYER = 13, 17
# Around the layers: embeddings, the mask (arange, lt, zeros, not, fill), positions, norm, head: 12;
# random numbers 58; reading and advancing the rows 21.
AROUND = 12 + 58 + 21
SMALL_DRAW, DRAW = 16, 32  # a small vocabulary is drawn from on one level


@pytest.mark.slow
@pytest.mark.parametrize(("name", "per_layer"), [("opt", OPT_LAYER), ("llama", LLAMA_LAYER)])
def test_a_layer_of_a_captured_step_keeps_its_budget(name, per_layer):
    config = CONFIGS[name]()
    captured, around = decode_step(config)
    assert operators(captured) <= per_layer * config.num_hidden_layers + AROUND + SMALL_DRAW
    assert waits(captured) == 0
    assert around == {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "in_place"), [("llama", True), ("mistral", False)])
def test_prefill_repeats_no_shared_heads(name, in_place):
    """But where a window takes a bias."""
    with fake_cuda() as watch:
        fake_engine(watch, CONFIGS[name]()).generate([[5] * 9, [6] * 9], SAMPLED)
    assert ((False, "clone") in watch.counts) == (not in_place)


@pytest.mark.slow
def test_copies_of_a_step_do_not_grow_with_its_layers():
    """Chunks of prompts, with pages before them: what layers share is made once."""
    waiting = []
    for num_layers in (2, 4):
        config = CONFIGS["llama"]()
        config.num_hidden_layers = num_layers
        with fake_cuda() as watch:
            made = fake_engine(watch, config, cuda_graphs=False, **WAYS["chunks"])
            made.generate(PROMPTS, SAMPLED)
        waiting.append([watch.counts[False, name] for name in (READ, TO_DEVICE, TO_HOST)])
    assert waiting[0] == waiting[1]


# -- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.max().item(), READ),
        (lambda x: x.tolist(), READ),
        (lambda x: torch.tensor([1, 2], device=DEVICE), TO_DEVICE),
        (lambda x: torch.zeros(2).to(DEVICE), TO_DEVICE),
        (lambda x: x.copy_(torch.ones(4)), TO_DEVICE),
        (lambda x: x.cpu(), TO_HOST),
    ],
    ids=["item", "tolist", "tensor", "to", "copy_", "cpu"],
)
def test_a_wait_and_an_operator_are_counted(wait, name):
    with fake_cuda() as watch:
        x = torch.empty(4, device=DEVICE)
        watch.counts.clear()
        watch.capture(lambda: (wait(x), x + 1))()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.ones(4)
    captured = Counter({name: n for (inside, name), n in watch.counts.items() if inside})
    assert captured[name] == waits(captured) == captured["add"] == 1
