"""builtin/tiny: a Hugging Face folder, deterministic, complete or absent."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.builtin import tiny_model as builtin
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.tiny_model import materialise_tiny, resolve_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "sub" / "tiny"
    materialise_tiny(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def fingerprint(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def test_the_same_bytes_every_time(folder, tmp_path):
    torch.manual_seed(99)
    state = torch.get_rng_state()
    materialise_tiny(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(tmp_path / "again") == fingerprint(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["again"]
    materialise_tiny(tmp_path / "other", seed=1)
    changed = {n for n, h in fingerprint(tmp_path / "other").items() if h != fingerprint(folder)[n]}
    assert changed == {"model.safetensors"}


def test_the_loser_of_a_race_leaves_the_winner_alone(tmp_path):
    winner = tmp_path / "tiny"
    winner.mkdir()
    (winner / "config.json").write_text("the winner's")
    materialise_tiny(winner)
    assert (winner / "config.json").read_text() == "the winner's"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="'no seed'"):  # after the tokenizer is saved
        materialise_tiny(tmp_path / "tiny", seed="no seed")
    assert list(tmp_path.iterdir()) == []


def test_loads_with_plain_transformers_and_stops_at_its_eos(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) <= 1024
    assert sum(p.numel() for p in model.parameters()) < 600_000
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.bos_token_id is None
    loss = model(input_ids=torch.arange(40)[None], labels=torch.arange(40)[None]).loss
    assert torch.isfinite(loss)


def test_special_tokens(tokenizer):
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == list(builtin.SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.bos_token is None
    ids = tokenizer("<|user|>Hi<|assistant|>").input_ids
    assert (ids[0], ids[-1]) == (2, 3)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hi"


@pytest.mark.parametrize(
    "text", ["What is 2 plus 3?", " two  spaces\n\ttab", "Grüße, 你好 🙂", "x = 12.5 , y .", ""]
)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids == tiny_tokenizer()(text).input_ids


def test_common_words_are_single_tokens(tokenizer):
    """Generation is cheap: an answer has about as many tokens as words and punctuation marks."""
    answers = [row["chosen"] for row in builtin_rows()["eval"]]
    lengths = [len(ids) for ids in tokenizer(answers).input_ids]
    assert sum(lengths) / len(lengths) < 17
    assert max(lengths) < 32


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]

    def render(count, prompt=False):
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt
        )

    assert render(4) == "<|system|>Be kind.<|user|>Hi<|assistant|>Hello!<|end|><|user|>Bye"
    assert render(2, prompt=True) == "<|system|>Be kind.<|user|>Hi<|assistant|>"
    assert render(3).startswith(render(2, prompt=True))
    assert all(render(4).startswith(render(count)) for count in range(1, 4))


def test_resolve_model(tmp_path, monkeypatch):
    assert resolve_model("facebook/opt-125m", tmp_path) == "facebook/opt-125m"
    assert resolve_model("builtin/huge") == "builtin/huge"
    assert list(tmp_path.iterdir()) == []
    first = resolve_model("builtin/tiny", tmp_path)
    assert Path(first).parent == tmp_path
    before = tmp_path.stat().st_mtime_ns
    assert resolve_model("builtin/tiny", tmp_path) == first
    assert tmp_path.stat().st_mtime_ns == before  # a second call builds nothing
    monkeypatch.setitem(builtin.TINY_CONFIG, "hidden_size", 64)
    assert resolve_model("builtin/tiny", tmp_path) != first  # the name follows the content
