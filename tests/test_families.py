"""`benchmarks/families.py`: what people post-train loads, samples, trains, saves and reloads."""

import importlib.util
from pathlib import Path

import pytest
from quick import slow, some

ROOT = Path(__file__).resolve().parents[1]
# NOTE: `families` is a module of the engine's tests.
_spec = importlib.util.spec_from_file_location(
    "families_benchmark", ROOT / "benchmarks" / "families.py"
)
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)

import family_checks  # noqa: E402
import family_configs  # noqa: E402

SAVED, SCORED = ("LoRA", "names", "reloads"), ("reward", "GRPO")
# Qwen3.5 as published, with its vision part; Phi-3 with LongRoPE. checkpoint/test_hub_format.py
# saves Gemma 3 and mixtures of experts in the quick suite too.
QUICK = {"qwen3_5": SAVED + SCORED, "phi3": SAVED}
POPULAR = (*QUICK, "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_moe", "gemma2")
POPULAR += ("gemma3", "gpt_oss", "olmo3", "glm4_moe", "deepseek_v3")


def cells(family, folder, columns):
    family_checks.start()
    with open(folder / "log.txt", "w+") as log:
        row = benchmark.check(family, folder, log, columns)
        log.seek(0)
        print(log.read())
    return row


def faults(row, columns):
    """Cells that are empty, failed or refused: none of these families may be."""
    texts = {column: row.get(column, "empty") for column in columns}
    return {c: t for c, t in texts.items() if benchmark.failed(t) or t.startswith("refused")}


@pytest.mark.parametrize("family", some(QUICK, ["phi3"]))
def test_a_popular_family_is_itself_from_load_to_save(family, tmp_path):
    columns = benchmark.CHEAP + QUICK[family]
    assert faults(cells(family, tmp_path, columns), columns) == {}


@pytest.mark.parametrize(
    ("family", "column"),
    [
        *slow(
            [
                ("nemotron_h", "LoRA"),
                ("llama4", "packed"),
                # It reads in training the weights of modules that evaluation runs.
                ("gemma3n_text", "ZeRO-3"),
                ("youtu", "ZeRO-3"),  # zeroes its pad row at every load
                ("inkling2_text", "packed"),
                ("doge", "packed"),
            ]
        ),
    ],
)
def test_a_family_of_unusual_code_passes(family, column, tmp_path):
    row = cells(family, tmp_path, ("loads", column, "names", "reloads"))
    columns = ("loads", column) + (("names", "reloads") if column in benchmark.SFT else ())
    assert faults(row, columns) == {}


def test_a_family_that_does_not_load_in_shards_is_refused(tmp_path):
    """Transformers splits a fused weight of Sarvam's by the shapes of shards."""
    row = cells("sarvam_moe", tmp_path, ("loads", "ZeRO-3"))
    assert row["loads"] == "0"
    assert row["ZeRO-3"].startswith("refused: --model_name_or_path: transformers cannot load this")
    assert row["ZeRO-3"].endswith("; use ZeRO stage 2 or less")


@pytest.mark.slow
@pytest.mark.parametrize("family", POPULAR)
def test_a_popular_family_passes_every_step(family, tmp_path):
    row = cells(family, tmp_path, benchmark.COLUMNS)
    assert faults(row, benchmark.COLUMNS) == {}


def test_the_table_has_every_family():
    assert len(family_configs.FAMILIES) >= 189
    assert set(POPULAR) <= set(family_configs.FAMILIES)
