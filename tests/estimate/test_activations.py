"""Activations: by hand, extrapolated from few layers, of every family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from estimates import estimated, rlhf_fields
from quick import slow
from torch import nn

from dschat.config import UserError
from dschat.estimate.activations import Batch, run_pass
from dschat.estimate.models import Models, Use

BF16 = torch.bfloat16
FP32 = torch.float32


class TwoLayers(nn.Module):
    """Embedding (10, 4), 4 -> 16, ReLU, 16 -> 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 4), nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, rows):
        return self.down(self.up(self.embed(rows.input_ids)).relu()).squeeze(-1)


def test_activations_by_hand():
    """3 x 5 tokens, fp32: 15 x 4 embedded, 15 x 16 hidden, 15 scores, squares and their sum."""
    with torch.device("meta"):
        module = TwoLayers()
    run = run_pass(module, "value", Batch(3, 5, 5), train=True)
    tokens = 3 * 5 * 4  # bytes of one number per token
    # Forward: ReLU reads the hidden state and writes another, then the first is freed.
    forward = tokens * (4 + 16 + 16)
    # Backward: saved tensors (embedded, hidden, scores, loss) and the gradients of ReLU's output
    # and input; the gradients of the scores and of the last layer are already freed.
    backward = tokens * (4 + 16 + 16 + 16)
    assert forward <= backward <= run <= backward + 2 * tokens + 16 * 4
    forward_only = run_pass(module, "value", Batch(3, 5, 5), train=False)
    assert forward_only == tokens * (16 + 16)  # the embeddings are freed


@pytest.fixture
def nine_layers(opt):
    config = json.loads(Path(opt("350m"), "config.json").read_text())
    config |= {"num_hidden_layers": 9, "hidden_size": 64, "ffn_dim": 256, "vocab_size": 4096}
    folder = Path(opt("350m")).parent / "nine"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"word_embed_proj_dim": 32}))
    return str(folder)


@pytest.mark.parametrize("checkpointing", [*slow([False]), True])
def test_extrapolation_from_few_layers_is_exact(nine_layers, checkpointing):
    use = Use(nine_layers, "--x", "lm", FP32, gradient_checkpointing=checkpointing)
    quick = Models().run(use, "policy", Batch(4, 64, 32), train=True)
    whole = Models(shallow=9).run(use, "policy", Batch(4, 64, 32), train=True)
    assert quick == whole


@pytest.mark.parametrize("kind", ["lm", *slow(["score"])])
def test_adapters_of_few_layers_tell_those_of_all(nine_layers, kind):
    use = Use(nine_layers, "--x", kind, FP32, lora_dim=4, lora_modules=("all-linear",))
    assert Models().sizes(use) == Models(shallow=9).sizes(use)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", *slow(["off"])])
def test_attention_memory_is_linear_in_the_length(opt, packing):
    """Equal steps in length, equal steps in activations: no (T, T) matrix, no (T, V) logits."""
    use = Use(opt("350m"), "--x", "lm", BF16, packing=packing)
    short, middle, long = (
        Models().run(use, "sft", Batch(2, length, length - 1), train=True)
        for length in (512, 1024, 1536)
    )
    assert long - middle == pytest.approx(middle - short, rel=0.001)


def test_columns_that_are_not_read_have_no_logits(opt):
    use = Use(opt("350m"), "--x", "lm", BF16)
    few, all_but_one = (
        Models().run(use, "policy", Batch(2, 512, num_read), train=False) for num_read in (64, 511)
    )
    assert few + 2 * 447 * 50272 < all_but_one  # their 16-bit logits at least


@pytest.mark.parametrize("work", ["policy", "value"])
def test_a_shared_prompt_counts_once(opt, work):
    """Eight answers of 32 tokens to two prompts of 64: the tokens of 384, not of 768."""
    use = Use(opt("350m"), "--x", "lm" if work == "policy" else "score", BF16)
    shared, equal, whole = (
        Models().run(use, work, batch, train=True)
        for batch in (Batch(8, 96, 32, 2, 64), Batch(4, 96, 64), Batch(8, 96, 32))
    )
    assert shared == pytest.approx(equal, rel=0.02)
    assert shared < (0.6 if work == "value" else 0.9) * whole


def test_a_family_that_cannot_be_packed(tiny):
    """Padded by default; ``--packing on`` is the error of the run itself."""
    use = Use(tiny("bloom"), "--x", "lm", FP32)
    batch = Batch(2, 8, 7)
    padded, default = (
        Models().run(replace(use, packing=packing), "sft", batch, train=True)
        for packing in ("off", "auto")
    )
    assert padded == default
    with pytest.raises(UserError, match="^--packing on: a BloomForCausalLM cannot"):
        Models().run(replace(use, packing="on"), "sft", batch, train=True)


FAMILIES = ["opt_350m"]
FAMILIES += slow(["llama", "bloom", "opt", "gpt2", "gpt_neox", "mistral", "qwen3"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_estimated(tiny, family):
    fields = {"actor_gradient_checkpointing": True, "critic_lora_dim": 4}
    done = estimated(rlhf_fields(tiny(family)) | fields)
    size = sum(p.numel() for p in tiny_models.causal_lm(family).parameters())
    assert done.peak.items["actor weights"] == 2 * size
    assert done.fits


@pytest.mark.slow
def test_ranks_share_the_activations(tiny):
    fields = rlhf_fields(tiny("llama")) | {"max_answer_seq_len": 40}
    peaks = []
    for size in (1, 2):
        step = estimated(fields | {"sequence_parallel_size": size}, num_processes=2)
        training = next(mode for mode in step.modes if mode.name == "training")
        peaks.append(training.items["activations"])
    assert 0.4 * peaks[0] < peaks[1] < 0.55 * peaks[0]
