"""Step configs: derived batch sizes and clip ranges, and errors that name the flag."""

import argparse
import itertools
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Optional

import pytest

from dschat.config import RLHFConfig, SFTConfig, UserError
from dschat.config.fields import Bounds, flag, require_valid

MODELS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


def test_batch_sizes_of_step_3():
    args = RLHFConfig(
        **MODELS,
        per_device_generation_batch_size=8,
        generation_batches=3,
        num_samples_per_prompt=2,
        per_device_training_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert args.rollout_prompts(5) == 8 * 3 * 5
    assert args.rollout_samples(5) == 8 * 3 * 5 * 2
    assert args.mini_batch_size(5) == 4 * 2 * 5
    assert args.num_mini_batches == 6  # 48 sequences a process, 8 of them a step
    assert [args.mini_batches_of(n, 5) for n in (0, 3, 20, 120, 240)] == [1, 1, 1, 6, 12]
    with pytest.raises(UserError, match="= 40 does not divide the 42 sequences .* .21 prompts"):
        args.mini_batches_of(21, 5)
    args.per_device_training_batch_size, args.num_samples_per_prompt = 64, 3
    with pytest.raises(UserError, match="= 128 does not divide the 126 sequences"):
        args.mini_batches_of(42, 1)  # a full rollout, which is no whole step
    assert args.mini_batches_of(41, 1) == 1


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ((8, 2, 4, 1, 2), 8),  # 16 sequences, of which a step takes 8
        ((4, 4, 8, 2, 1), 32),
        ((4, 4, 8, 1, 2), 16),
        ((8, 16, 8, 1, 1), 128),  # DeepSpeed-Chat's OPT 6.7B: one step in 16 rollouts of 8
    ],
)
def test_a_rollout_has_the_sequences_of_a_step(sizes, prompts):
    names = (
        *("per_device_generation_batch_size", "gradient_accumulation_steps"),
        *("per_device_training_batch_size", "generation_batches", "num_samples_per_prompt"),
    )
    args = RLHFConfig(**MODELS, **dict(zip(names, sizes, strict=True)))
    args.validate()
    assert args.rollout_prompts(3) == 3 * prompts


def test_the_smallest_rollout_is_one_answer_of_one_token():
    lengths = {"max_prompt_seq_len": 1, "max_answer_seq_len": 1}
    sizes = {"per_device_generation_batch_size": 1, "per_device_training_batch_size": 1}
    for given in ({}, {"generation_batches": 1, "num_samples_per_prompt": 1}):
        args = RLHFConfig(**MODELS, **lengths, **sizes, **given)
        args.validate()
        assert args.rollout_samples(1) == args.num_mini_batches == args.samples_under_way == 1


def test_a_partial_rollout_has_more_samples_under_way():
    sizes = {"per_device_generation_batch_size": 5, "per_device_training_batch_size": 2}
    args = RLHFConfig(**MODELS, **sizes, num_samples_per_prompt=2, oversample=0.5)
    assert args.samples_under_way == 5 * 2
    args.partial_rollout = True
    assert args.samples_under_way == 8 * 2  # of 7.5 prompts


@pytest.mark.parametrize(
    "flags", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_answer_seq_len": 2}]
)
def test_what_vllm_draws_from_at_a_temperature(flags):
    """Its log-probs are those of training where the temperature is 1, and of greedy answers."""
    for temperature in (0.0, 0.7, 1.0):
        for chosen in ({}, flags):
            config = RLHFConfig(**MODELS, rollout_backend="vllm", temperature=temperature, **chosen)
            words = "vllm does not go with --top_k, .* with --temperature 0.7; drop it"
            refused = bool(chosen) and temperature == 0.7
            with pytest.raises(UserError, match=words) if refused else nullcontext():
                config.validate()


def test_few_prompts_are_a_rollout_that_its_steps_divide():
    """By trying every number: the most that are one step, or some whole steps."""
    for samples, batch, world in itertools.product((1, 2, 3, 8, 24), (2, 4, 12), (1, 2)):
        args = RLHFConfig(
            per_device_generation_batch_size=8,
            num_samples_per_prompt=samples,
            per_device_training_batch_size=batch,
        )
        full, mini = args.rollout_prompts(world), batch * world
        if full * samples % mini:
            continue  # refused, whatever the data
        assert args.divisible_prompts(full, world) == full
        for rows in range(1, full):
            whole = [n for n in range(1, rows + 1) if n * samples % mini == 0]
            less = [n for n in range(1, rows + 1) if n * samples < mini]
            assert args.divisible_prompts(rows, world) == max([*whole, *less], default=rows)


def test_batch_size_of_steps_1_and_2():
    config = SFTConfig(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert config.global_batch_size(2) == 24


def test_from_a_namespace_with_some_of_the_fields(caplog):
    args = RLHFConfig.from_namespace(argparse.Namespace(kl_coef=0.3, not_ours=1))
    assert args.kl_coef == 0.3
    assert args.gamma == RLHFConfig().gamma
    assert RLHFConfig.from_namespace({"seed": 5}).seed == 5
    nothing = {"save_total_limit": None, "num_generations": None}
    assert RLHFConfig.from_namespace(nothing) == RLHFConfig()
    assert caplog.text == ""


@pytest.mark.parametrize(("value", "word"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_packing_as_trl_has_it(value, word):
    assert SFTConfig.from_namespace({"packing": value}).packing == word


def test_settings_of_other_trainers_in_a_namespace_are_named(caplog):
    RLHFConfig.from_namespace(argparse.Namespace(kl_coef=0.3, not_ours=1, local_rank=0))
    assert caplog.text == ""
    RLHFConfig.from_namespace({"num_generations": 4, "epsilon": 0.1, "seed": 1})
    assert "args: unknown settings: num_generations (use num_samples_per_prompt), epsilon (use" in (
        caplog.text
    )


class Args:
    kl_coef = 0.3
    max_answer_len = 7  # its name in DeepSpeed-Chat


class More(Args):
    seed = 5
    eval_batch_size = property(lambda self: 1 / 0)


@pytest.mark.parametrize("args", [More, More()])
def test_from_attributes_of_a_class(args):
    made = RLHFConfig.from_namespace(args)
    assert (made.kl_coef, made.seed) == (0.3, 5)
    assert made.eval_batch_size == RLHFConfig().eval_batch_size


def test_args_of_its_own_type_are_kept():
    args = RLHFConfig()
    assert RLHFConfig.from_namespace(args) is args


@pytest.mark.parametrize(
    ("values", "sides"),
    [
        ({}, (0.2, 0.2)),
        ({"cliprange": [0.1]}, (0.1, 0.1)),
        ({"cliprange": [0.1, 0.3]}, (0.1, 0.3)),
        ({"policy_loss": "gspo"}, (3e-4, 4e-4)),
        ({"policy_loss": "cispo", "cliprange": [1.0, 5.0]}, (1.0, 5.0)),
    ],
)
def test_the_ratio_is_clipped_on_both_sides(values, sides):
    args = RLHFConfig(**MODELS, **values)
    args.validate()
    assert args.cliprange_sides == sides


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Bounds(ge=1), [1, 2, 2**19], [0, -3], "must be at least 1"),
        (Bounds(ge=0), [0, 0.5], [-1e-9], "must not be negative"),
        (Bounds(gt=0), [1e-9], [0, -1], "must be positive"),
        (Bounds(gt=1), [1.5], [1, 0], "must be above 1"),
        (Bounds(ge=0, le=3), [0, 3], [4, -1], "must be between 0 and 3"),
        (Bounds(ge=0, lt=1), [0, 0.5], [1, -0.1], "must be in [0, 1)"),
        (Bounds(gt=0, le=1, remedy="; 1: off"), [1, 0.1], [0, 1.1], "must be in (0, 1]; 1: off"),
    ],
    ids=str,
)
def test_bounds_of_a_flag(bounds, inside, outside, words):
    @dataclass
    class Flags:
        number: Optional[float] = flag(None, "A number.", **vars(bounds))

    for value in (None, *inside):
        require_valid(Flags(value))
    for value in outside:
        with pytest.raises(UserError, match=f"^--number {value} {re.escape(words)}$"):
            require_valid(Flags(value))
