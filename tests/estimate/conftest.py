"""`estimates` is a plain module beside these tests; `opt` writes configurations."""

import json
import sys
from pathlib import Path

import pytest

from dschat.estimate import report
from dschat.estimate.models import Models

sys.path.insert(0, str(Path(__file__).parent))

ALL = Models()

# hidden size, layers, heads, width of the embedding, norm before attention: OPT's table of sizes
# (Zhang et al. 2022, arXiv 2205.01068, table 1); the MLP is four times as wide.
OPT = {
    "350m": (1024, 24, 16, 512, False),
    "1.3b": (2048, 24, 32, 2048, True),
    "2.7b": (2560, 32, 32, 2560, True),
    "6.7b": (4096, 32, 32, 4096, True),
    "13b": (5120, 40, 40, 5120, True),
    "30b": (7168, 48, 56, 7168, True),
    "66b": (9216, 64, 72, 9216, True),
    "small": (1024, 8, 16, 1024, True),  # not in the table; with a smaller vocabulary
}


@pytest.fixture(autouse=True)
def shared_models(monkeypatch):
    """What is counted of a checkpoint is counted once for all tests: half of their time."""
    monkeypatch.setattr(report, "Models", lambda made_from: Models(made_from) if made_from else ALL)


@pytest.fixture(scope="session")
def opt(tmp_path_factory):
    """``opt("2.7b")``: a folder with only that OPT's configuration."""
    folder = tmp_path_factory.mktemp("opt")

    def make(size: str) -> str:
        hidden, layers, heads, embedding, norm_before = OPT[size]
        path = folder / f"opt-{size}"
        path.mkdir(exist_ok=True)
        config = {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 4096 if size == "small" else 50272,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": 4 * hidden,
            "word_embed_proj_dim": embedding,
            "do_layer_norm_before": norm_before,
            "max_position_embeddings": 2048,
        }
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return make
