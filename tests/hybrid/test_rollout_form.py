"""Choice of the rollout form, its errors, and the memory it frees between rollouts.

tests/dist/test_parity checks that rollouts use the current weights, per family and ZeRO stage.
"""

import dataclasses
import logging
import weakref

import pytest
import torch
from captures import noted
from families import EOS, PROMPTS, build
from quick import slow
from rollout_cases import GREEDY, SAMPLED, Actor, large_model
from step_cases import Case, build_trainer, my_prompts, ppo_config
from tiny_models import causal_lm

from dschat.config import UserError
from dschat.hybrid.rollout_form import EngineRollout, ModuleRollout, check_tensor_parallel
from dschat.inference import InferenceEngine
from dschat.inference.generators import hf_generator
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.models.checkpoint import Checkpoint

# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "lora", "settings", "message"),
    [
        (0, True, {"layout": "zero_copy", "lora": "merge"}, "zero_copy .*--rollout_lora side"),
        (0, False, {"layout": "zero_copy", "dtype": torch.bfloat16}, "--rollout_layout zero_copy"),
        (0, True, {"layout": "zero_copy", "frozen_base": False}, "zero_copy .*--rollout_lora side"),
        (0, True, {"lora": "side", "frozen_base": False}, "side needs --only_optimize_lora"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(zero, lora, settings, message):
    with pytest.raises(UserError, match=message) as raised:
        Actor(build("llama"), zero, lora).form(**settings)
    assert "\n" not in str(raised.value)


def test_processes_that_a_group_s_size_does_not_divide():
    with pytest.raises(UserError, match="^--inference_tp_size 2 does not divide the 1 processes; "):
        check_tensor_parallel(build("llama").config, 2)


@pytest.mark.parametrize(
    ("zero", "lora", "settings", "said"),
    [
        (0, False, {}, ["its own copy", "float32", "TP 1", "pages of whole sequences"]),
        (0, True, {"layout": "zero_copy"}, ["training's own weights", "LoRA side"]),
        (3, True, {}, ["its own copy", "LoRA side"]),  # the frozen base is gathered once
        *slow(
            [
                (2, False, {"layout": "zero_copy", "page_size": 16}, ["own", "of 16 tokens"]),
                (0, True, {}, ["its own copy", "LoRA merge"]),
                (3, False, {"layout": "zero_copy"}, ["training's own weights"]),  # one process
                (3, True, {"frozen_base": False}, ["its own copy", "LoRA merge"]),
            ]
        ),
    ],
)
def test_one_line_says_what_was_chosen(zero, lora, settings, said, caplog):
    actor = Actor(build("llama"), zero, lora)
    with caplog.at_level(logging.INFO, logger="dschat"):
        form = actor.form(**settings)
    assert isinstance(form, EngineRollout)
    assert caplog.records == []  # families of the table need no warning
    line = form.describe()
    assert "\n" not in line
    assert [words for words in said if words not in line] == []


# -- quantized weights -----------------------------------------------------------------------------


IN_PLACE = "the Hugging Face module on training's own weights"


def quantized_actor(path, bits=4):
    checkpoint = Checkpoint(path, "--actor_model_name_or_path")
    return Actor(checkpoint.language_model(torch.float32, weight_bits=bits), 0, lora=True)


@pytest.mark.parametrize("bits", [4, *slow([8])])
@pytest.mark.parametrize(
    ("settings", "said", "copies"),
    [
        ({}, IN_PLACE, False),
        *slow(
            [
                ({"layout": "copy"}, "its own copy (", True),
                ({"layout": "zero_copy"}, IN_PLACE, False),
                ({"lora": "side"}, "its own copy (", True),
            ]
        ),
    ],
)
def test_quantized_weights_are_read_in_place_or_copied_whole(bits, settings, said, copies, tiny):
    actor = quantized_actor(tiny("llama"), bits)
    form = actor.form(**settings)
    assert said in form.describe()
    assert isinstance(form, EngineRollout) == copies
    for _ in range(2):
        answers = form.enter(actor.version).generate(PROMPTS, SAMPLED)
        form.leave()
        assert actor.gap(PROMPTS, answers) < 1e-4
        actor.step()
    assert actor.gap(PROMPTS, answers) > 0.01  # older adapters would have shown


def test_quantized_weights_are_not_borrowed_by_the_table_s_decoder(tiny):
    actor = quantized_actor(tiny("llama"))
    with pytest.raises(UserError, match=r"--rollout_layout zero_copy .*auto, if quantized"):
        actor.form(layout="zero_copy", lora="side")


# -- families outside the table --------------------------------------------------------------------


@pytest.mark.parametrize("zero", [*slow([0]), 3])
def test_other_families_generate_with_their_module_and_say_so(zero, caplog):
    actor = Actor(large_model("codegen"), zero)
    with caplog.at_level(logging.INFO, logger="dschat"):
        form = actor.form()
    assert isinstance(form, ModuleRollout)
    assert form.describe().startswith("inference engine with the Hugging Face module")
    expected = actor.num_bytes()[0] if zero == 3 else 0  # a copy, or training's own
    old = form.enter(0).generate(PROMPTS, SAMPLED)
    form.leave()
    actor.step()
    generator = form.enter(1)
    assert isinstance(generator, InferenceEngine)
    new = generator.generate(PROMPTS, SAMPLED)
    assert [r for r in caplog.records if r.name == "dschat" and r.levelno > logging.INFO] == []
    assert form.last_refresh.num_bytes == expected
    form.leave()
    form.enter(1)
    assert form.last_refresh.num_bytes == 0
    assert actor.gap(PROMPTS, new) < 1e-4
    assert actor.gap(PROMPTS, old) > 1e-3


def test_a_family_is_held_against_plain_forwards_once(monkeypatch):
    checks = noted(monkeypatch, hf_generator, "decoding_problem")
    form = Actor(large_model("codegen"), 3).form(release_weights=True)
    for version in range(2):
        form.enter(version)
        form.leave()
    assert len(checks) == 1


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_family_that_no_decoder_runs_is_checked_and_named_once(zero, caplog, monkeypatch):
    """RecurrentGemma keeps states in its module."""
    checks = noted(monkeypatch, hf_generator, "decoding_problem")
    actor = Actor(causal_lm("recurrent_gemma"), zero)
    form, prompts = actor.form(release_weights=True), PROMPTS[3:5]
    caplog.clear()
    for version in range(2):
        rollout = form.enter(version).generate(prompts, SAMPLED)
        form.leave()
        assert actor.gap(prompts, rollout) < 1e-4
        actor.step()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("NO FAST GENERATION: RecurrentGemma")
    assert [type(given[0]) for given in checks] == [InferenceEngine, HuggingFaceGenerator]


def test_without_the_hybrid_engine_the_module_generates():
    form = Actor(build("llama"), 0).form(enabled=False)
    assert isinstance(form.enter(0), HuggingFaceGenerator)


# -- memory between rollouts -----------------------------------------------------------------------


def test_weights_are_let_go_for_real():
    """Not only forgotten by the count, while a decoder that has looked them up holds on."""
    form = Actor(build("llama"), 3).form(release_cache=True, release_weights=True)
    generator = form.enter(0)
    linears = list(generator.weights.linears.values())
    embedding = weakref.ref(generator.weights.tensors["embed.weight"])
    generator.generate(PROMPTS, GREEDY)
    assert len(linears) == 9  # four of each layer, and the head
    assert all(linear.nbytes > 0 for linear in linears)
    form.leave()
    assert sum(linear.nbytes for linear in linears) == 0
    assert embedding() is None


def test_the_flags_reach_the_rollout(models_folder):
    case = Case("ppo")
    config = dataclasses.replace(
        ppo_config(case, models_folder),
        release_inference_cache=True,
        unpin_actor_parameters=True,
        kv_page_size=4,
        tp_gather_partition_size=3,
    )
    trainer = build_trainer(config)
    assert trainer.engine.rollout_settings().layers_per_bucket == 3
    trainer.train_rlhf(trainer.generate_experience(my_prompts(case, 0, config)))
    trainer.generate_experience(my_prompts(case, 1, config))
    assert trainer.metrics["rollout/logprob_gap"] < 1e-5
    with trainer.engine.rollout_mode() as generator:
        assert isinstance(generator, InferenceEngine)
        assert generator.page_size == 4
        generator.generate([[5, 6]], dataclasses.replace(GREEDY, max_new_tokens=2))
        cache = weakref.ref(generator.cache)
        assert generator.weights.nbytes > 0
    assert generator.weights.nbytes == 0
    assert cache() is None


def test_the_engine_of_the_moving_average_is_apart():
    """Another model's weights, in between, leave the rollout's own alone."""
    actor = Actor(build("llama"), 0)
    form = actor.form()
    before = form.enter(0).generate(PROMPTS, SAMPLED)
    other = build("llama", seed=1)
    average = form.filled_from((n, p.detach()) for n, p in other.named_parameters())
    assert average.generate(PROMPTS, SAMPLED).token_ids != before.token_ids
    assert form.enter(0).generate(PROMPTS, SAMPLED) == before
    assert form.last_refresh.num_bytes == 0
    assert average.stop_ids == (EOS,)
