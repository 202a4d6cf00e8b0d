"""Many rollouts on one engine with new weights in between: no page leaks, no answer is lost.

Every rollout has other lengths, counts, samples and stops. The cache is so small that sequences
wait and are computed again; a second engine with a large cache gives the expected answers.
"""

import random

import psutil
import pytest
import torch
from families import EOS, POSITIONS, VOCAB, build, cache_gib, empty_engine, stream

from dschat.inference import SamplingParams
from dschat.inference.speculation import AnswerHistory

MIB = 2**20


def random_rollout(rng):
    """Prompts, their numbers, and what is asked; empty rollouts and one-token prompts included."""
    count = rng.choice([0, 1, 2, 5, 9, 14])
    prompts = []
    for _ in range(count):
        length = rng.choice([1, 3, 8, 16, rng.randint(1, 36)])
        prompts.append([rng.randrange(VOCAB) for _ in range(length)])
    max_new_tokens = rng.choice([1, 4, 12, 24])
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=rng.choice([0, 0, min(3, max_new_tokens)]),
        n=rng.choice([1, 1, 2, 4]),
        seed=rng.randrange(2**31),
        temperature=rng.choice([0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(1, VOCAB), rng.choice([0, 1, 6]))),
    )
    return prompts, rng.sample(range(1000), count), sampling


@torch.no_grad()
def optimizer_step(module, generator):
    """Every parameter moves, in place."""
    for parameter in module.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def soak(name, rollouts, layout, seed, speculate="off"):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    module = build(name)
    roomy = empty_engine(module.config, max_num_seqs=56)
    tight = empty_engine(
        module.config,
        max_num_seqs=6,
        page_size=4,
        max_num_batched_tokens=21,
        kv_cache_gib=cache_gib(roomy, POSITIONS + 16),
        speculate=speculate,
    )
    if tight.speculation:
        tight.speculation.history = AnswerHistory(max_tokens=300)
    tensors = dict(module.named_parameters())
    if layout == "borrowed":
        tight.weights.borrow(tensors)
    preemptions, waited, accepted, reasons, memory = 0, 0, 0, set(), []
    for i in range(rollouts):
        if i % 4 == 0:
            optimizer_step(module, generator)
            roomy.weights.load(stream(module))
            if layout == "copy":
                tight.weights.load(stream(module))
        if not i % 3 or speculate == "off":  # else the same again, which has a history
            prompts, numbers, sampling = random_rollout(rng)
        got = tight.generate(prompts, sampling, indices=numbers)
        assert len(got) == len(prompts) * sampling.n  # every prompt answered, once a sample
        expected = roomy.generate(prompts, sampling, indices=numbers)
        assert got.token_ids == expected.token_ids, f"rollout {i}"
        assert got.finish_reasons == expected.finish_reasons
        assert tight.cache.num_free == tight.cache.num_pages
        check_ends(got, sampling)
        assert not tight.speculation or tight.speculation.history.num_tokens <= 300
        accepted += tight.stats.accepted_tokens
        preemptions += tight.stats.preemptions
        waited += tight.stats.cache_use == 1.0
        reasons |= set(got.finish_reasons)
        memory.append(psutil.Process().memory_info().rss)
    assert preemptions > rollouts // 4
    assert waited > 0
    assert (accepted > rollouts) == (speculate == "history")
    assert reasons == {"stop", "length"}
    return memory


def check_ends(rollout, sampling):
    ends = sampling.end_ids((EOS,))
    for ids, logprobs, reason in zip(
        rollout.token_ids, rollout.logprobs, rollout.finish_reasons, strict=True
    ):
        assert 1 <= len(ids) == len(logprobs) <= sampling.max_new_tokens
        assert not ends & set(ids[:-1])
        assert (ids[-1] in ends) == (reason == "stop")
        assert reason == "stop" or len(ids) == sampling.max_new_tokens


@pytest.mark.parametrize("speculate", ["off", "history"])
def test_a_short_soak(speculate):
    soak("llama", 24, "copy", 0, speculate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "speculate"), [("copy", "off"), ("borrowed", "off"), ("copy", "history")]
)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom", "mistral"])
def test_two_hundred_rollouts(name, layout, speculate):
    """Memory is flat: the weights alone of 50 versions would be 4 MiB and more, uncollected."""
    memory = soak(name, 200, layout, 1, speculate)
    warm, late = sorted(memory[50:80]), sorted(memory[-30:])
    assert late[15] - warm[15] < 2 * MIB
