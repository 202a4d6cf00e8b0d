"""Log-probs by token: its own bytes, and one entry for each alternative."""

import json
from types import SimpleNamespace

import pytest
from byte_tokenizers import byte_tokenizer
from joined_texts import KINDS, SPACE, tokenizer_of

from dschat.models.continued_text import token_bytes
from dschat.openai_api.answer_text import Event, Token
from dschat.openai_api.responses import ChatFormat, CompletionFormat

TEXT = "naïve 東 café 👩‍👩‍👧 \ufffd! the capital"


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k][0] == "bpe"])
def test_bytes_of_tokens_joined_are_the_text(kind):
    """Characters of several byte tokens, spaces that SentencePiece drops at a text's start."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    joined = b"".join(token_bytes(tokenizer, token) for token in ids)
    assert joined.decode().lstrip(" ") == TEXT
    assert any(len(token_bytes(tokenizer, token).decode(errors="ignore")) == 0 for token in ids)


def test_each_byte_is_its_own():
    level, piece = byte_tokenizer("</s>"), tokenizer_of("prepend")
    alphabet = {token_bytes(level, i) for i in level.get_vocab().values()}
    assert {bytes([byte]) for byte in range(256)} <= alphabet
    for byte in range(256):
        token = piece.convert_tokens_to_ids(f"<0x{byte:02X}>")
        assert token_bytes(piece, token) == bytes([byte])


def event_of(tokenizer, names):
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    top = [(token, -1.0 - i) for i, token in enumerate(ids)]
    return Event(0, "", Token(None, 0, ids[0], -1.0, top, None), None, 0)


def test_alternatives_of_equal_text_are_all_there():
    tokenizer = tokenizer_of("prepend")
    generation = SimpleNamespace(tokenizer=tokenizer, model_name="m")
    event = event_of(tokenizer, ["<0xE2>", "<0xE3>", SPACE, "<0x20>", "s", SPACE + "s"])
    (choice,) = CompletionFormat(generation, True).chunk([event])["choices"]
    space = tokenizer.convert_tokens_to_ids("<0x20>")
    names = ["bytes:\\xe2", "bytes:\\xe3", " ", f"token_id:{space}", "s", " s"]
    assert choice["logprobs"]["tokens"] == names[:1]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert top == dict(zip(names, [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], strict=True))

    (choice,) = ChatFormat(generation, True).chunk([event])["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert [e["bytes"] for e in entry["top_logprobs"]] == [
        [0xE2], [0xE3], [0x20], [0x20], [*b"s"], [*b" s"],
    ]  # fmt: skip
    json.dumps(choice)
