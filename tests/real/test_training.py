"""Supervised training of real models: against plain torch, resumed, under ZeRO-3, saved."""

import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from training_runs import command, logged, mean_loss, metrics, on_two_ranks, row_ids, run, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from dschat.distributed.stop_signals import EXIT_CODE
from dschat.models.quantized import finish_loading

pytestmark = pytest.mark.real

LORA = "--lora_dim 8 --learning_rate 1e-3"
BATCH = "--per_device_train_batch_size 8"
CLOSE = {"abs": 1e-4}


@pytest.fixture(scope="module")
def flags(folder, template) -> str:
    """All weights of the smaller model train, adapters of the other one."""
    size = "--learning_rate 1e-5" if "135m" in folder.name else LORA
    return size + (f" --chat_template {template}" if template else "")


@pytest.fixture(scope="module")
def whole(folder, flags, tmp_path_factory) -> Path:
    """Four steps, uninterrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(command("sft", folder, out, flags, BATCH))
    return out


def loaded(path: Path, **options) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@torch.no_grad()
def test_the_saved_model_has_the_loss_of_training(folder, whole, tokenizer):
    """Before and after the steps, by transformers; and by PEFT, of an adapter."""
    rows = row_ids(tokenizer)
    before, after = logged(whole, "eval/loss")
    assert after < before - 0.05
    assert logged(whole, "loss")[0] == pytest.approx(before, **CLOSE)
    base, saved = loaded(folder), loaded(whole)
    assert float(mean_loss(base, rows)) == pytest.approx(before, **CLOSE)
    assert float(mean_loss(saved, rows)) == pytest.approx(after, **CLOSE)
    assert row_ids(AutoTokenizer.from_pretrained(whole)) == rows
    assert base.config.tie_word_embeddings == saved.config.tie_word_embeddings is True
    assert "lm_head.weight" not in weights(whole)
    if (whole / "adapter").exists():
        adapted = PeftModel.from_pretrained(base, whole / "adapter").eval()
        ids = torch.tensor([rows[0][0]])
        assert (adapted(ids).logits - saved(ids).logits).abs().max() < 1e-3


def test_full_training_is_that_of_plain_torch(smollm2, tmp_path):
    out = tmp_path / "run"
    run(command("sft", smollm2, out, "--learning_rate 1e-5 --max_grad_norm 0", BATCH))
    rows, module = row_ids(AutoTokenizer.from_pretrained(smollm2)), loaded(smollm2)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-5, (0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(4):
        loss = mean_loss(module, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert logged(out, "loss") == pytest.approx(losses, **CLOSE)


def test_stopped_and_resumed(folder, flags, whole, tmp_path):
    """The bits of the run that was not."""
    out = tmp_path / "run"
    argv = command("sft", folder, out, flags, BATCH)
    after = str(out / "metrics.jsonl")
    run(argv, EXIT_CODE, signum=signal.SIGTERM, after_file=after)
    assert 1 <= len(logged(out, "loss")) < 4
    run([*argv, "--resume"])
    assert metrics(out) == metrics(whole)
    expected = weights(whole)
    found = weights(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_ranks_under_zero_3(folder, flags, whole, tmp_path):
    out = tmp_path / "run"
    share = "--zero_stage 3 --per_device_train_batch_size 4"
    on_two_ranks(command("sft", folder, out, flags, share), tmp_path / "ranks")
    for name in ("loss", "eval/loss"):
        assert logged(out, name) == pytest.approx(logged(whole, name), **CLOSE)
    expected, found = weights(whole), weights(out)
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 1e-3 for name in expected)


@torch.no_grad()
def test_qlora(folder, template, tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "run"
    chat = f"--chat_template {template}" if template else ""
    run(command("sft", folder, out, LORA, BATCH, "--load_in_4bit", chat))
    before, after = logged(out, "eval/loss")
    assert after < before - 0.05
    rows = row_ids(tokenizer)
    assert float(mean_loss(loaded(out), rows)) == pytest.approx(after, **CLOSE)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = loaded(folder, quantization_config=bits)
    finish_loading(base, torch.float32)  # bitsandbytes' own products are wrong on some CPUs
    assert float(mean_loss(base, rows)) == pytest.approx(before, **CLOSE)
    adapted = PeftModel.from_pretrained(base, out / "adapter").eval()
    assert float(mean_loss(adapted, rows)) == pytest.approx(after, **CLOSE)
