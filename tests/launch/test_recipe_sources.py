"""The recipes against the scripts that they name: rates, scales, lengths, batches.

Numbers are those of microsoft/DeepSpeedExamples, applications/DeepSpeed-Chat/training, of
OpenRLHF's examples/scripts and of TRL's examples. The rate of DeepSpeed-Chat's adapters is
``--lora_learning_rate``, whose default of 5e-4 no script changes: ``--learning_rate`` of a LoRA
script is for other weights.
"""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from dschat.models.lora import add_lora

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
LORA_RATE = 5e-4
FULL, CRITIC = 9.65e-6, 5e-6
# recipe: rate and sequence length of step 1; of step 2; rates of actor and critic, lengths
STEPS = {
    "llama-2-7b": ((FULL, 512), (FULL, 512), (FULL, CRITIC, 256, 256)),
    "llama-2-7b-lora": ((LORA_RATE, 512), (LORA_RATE, 512), (LORA_RATE, LORA_RATE, 256, 256)),
    "opt-1.3b": ((FULL, 512), (5e-5, 512), (FULL, CRITIC, 256, 256)),
    "opt-6.7b": ((FULL, 512), (5e-5, 512), (FULL, CRITIC, 256, 256)),
    "opt-13b": ((LORA_RATE, 512), (5e-5, 512), (LORA_RATE, CRITIC, 256, 256)),
    "opt-30b-lora": ((LORA_RATE, 512), (5e-5, 512), (LORA_RATE, CRITIC, 256, 256)),
    "opt-66b": ((LORA_RATE, 512), (5e-5, 512), (LORA_RATE, CRITIC, 256, 256)),
    "opt-175b": ((LORA_RATE, 512), (5e-5, 512), (LORA_RATE, CRITIC, 256, 256)),
    "openrlhf-7b": ((5e-6, 2048), (9e-6, 2048), (5e-7, 9e-6, 1024, 1024)),
    "openrlhf-13b": ((5e-6, 2048), (9e-6, 2048), (5e-7, 9e-6, 1024, 1024)),
    "openrlhf-34b": ((5e-6, 2048), (9e-6, 2048), (5e-7, 9e-6, 1024, 1024)),
    "openrlhf-70b": ((5e-6, 2048), (9e-6, 2048), (5e-7, 9e-6, 1024, 1024)),
    "qwen3-8b": ((2e-5, 2048), (1e-5, 2048), (3e-6, 3e-6, 512, 1024)),
}
# rank of steps 1 and 2, of actor and critic; the scale is 1 / rank
RANKS = {
    "llama-2-7b-lora": (128, 128, 64, 64),
    "opt-13b": (128, 0, 128, 0),
    "opt-30b-lora": (128, 0, 128, 0),
    "opt-66b": (128, 0, 128, 0),
    "opt-175b": (128, 0, 128, 0),
}
# examples of step 1 and pairs of step 2 in an optimizer step; sequences of a rollout, of a step
BATCHES = {
    "llama-2-7b": (32, 64, 8, 8),
    "llama-2-7b-lora": (32, 64, 8, 8),
    "opt-1.3b": (64, 64, 32, 32),
    "opt-6.7b": (48, 64, 32, 32),
    "opt-13b": (32, 64, 128, 128),
    "opt-30b-lora": (32, 64, 32, 32),
    "opt-66b": (256, 128, 256, 256),
    "openrlhf-7b": (256, 256, 1024, 128),
    "openrlhf-13b": (256, 256, 1024, 128),
    "openrlhf-70b": (256, 256, 1024, 128),
}


def read(name: str) -> dict:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


def test_every_recipe_of_a_model_is_here():
    ours = {p.stem for p in RECIPES.glob("*.yaml")}
    published = {n for n in ours if not read(n)["model"]["actor_model"].startswith("builtin/")}
    assert published == set(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_rates_and_lengths(name):
    first, second, third = (read(name)[f"step{n}"] for n in (1, 2, 3))
    lengths = ("max_prompt_seq_len", "max_answer_seq_len")
    assert STEPS[name] == (
        (first["learning_rate"], first["max_seq_len"]),
        (second["learning_rate"], second["max_seq_len"]),
        (third["actor_learning_rate"], third["critic_learning_rate"], *map(third.get, lengths)),
    )


@pytest.mark.parametrize("name", STEPS)
def test_ranks_and_scales(name):
    steps = read(name)
    ranks = (
        steps["step1"].get("lora_dim", 0),
        steps["step2"].get("lora_dim", 0),
        steps["step3"].get("actor_lora_dim", 0),
        steps["step3"].get("critic_lora_dim", 0),
    )
    assert ranks == RANKS.get(name, (0, 0, 0, 0))
    assert (steps["common"].get("lora_alpha") == 1) == any(ranks)


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    steps = read(name)
    devices = steps["launch"]["num_gpus"] * steps["launch"].get("num_nodes", 1)

    def batch(step: int, size: str) -> int:
        fields = steps[f"step{step}"]
        several = fields.get("gradient_accumulation_steps", 1) if "training" not in size else 1
        if step == 3 and "training" in size:
            several = fields.get("gradient_accumulation_steps", 1)
        if "generation" in size:
            several = fields.get("generation_batches", 1)
        return fields[size] * several * devices

    assert BATCHES[name] == (
        batch(1, "per_device_train_batch_size"),
        batch(2, "per_device_train_batch_size"),
        batch(3, "per_device_generation_batch_size"),
        batch(3, "per_device_training_batch_size"),
    )


def held_out_after(rate: float, alpha: float, rank: int, steps: int = 60) -> tuple[float, float]:
    """Held-out loss before and after training adapters on sequences that count upwards."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, initializer_range=0.1,
    )  # fmt: skip
    model = add_lora(LlamaForCausalLM(config), rank, alpha, ["all-linear"], True, "--lora_dim")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95))
    starts = torch.randperm(64)

    def loss(first: torch.Tensor) -> torch.Tensor:
        ids = (first[:, None] + torch.arange(12)) % 64
        return model(input_ids=ids, labels=ids).loss

    with torch.no_grad():
        before = loss(starts[48:]).item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(starts[:48]).backward()
        optimizer.step()
    with torch.no_grad():
        return before, loss(starts[48:]).item()


def test_adapters_learn_at_the_recipes_rate_and_scale():
    """All have the same. The rate of other weights lowered the loss by a thousandth of a nat."""
    recipe = read("llama-2-7b-lora")
    rank, alpha = recipe["step1"]["lora_dim"], recipe["common"]["lora_alpha"]
    before, after = held_out_after(recipe["step1"]["learning_rate"], alpha, rank)
    _, barely = held_out_after(FULL, alpha, rank)
    assert abs(before - barely) < 0.003
    assert before - after > 0.1
