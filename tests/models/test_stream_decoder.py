"""Streamed text: whole characters, spaces of SentencePiece, equal to decoding at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.models.continued_text import StreamDecoder


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def streamed(tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@pytest.mark.parametrize(
    "text",
    ["naïve café", "日本語です", "👩‍👩‍👧 family", "  two  spaces\n\nlines ", "a\u0301e", "\u00a0x"],
)
def test_stream_decoder_never_shows_half_a_character(tokenizer, text):
    """Byte-level tokens: characters of two to four bytes come whole, and none is lost."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([p for p in pieces if p]) > 1  # it did stream


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stream_decoder_equals_decoding_at_once(tokenizer, data):
    """Any tokens at all: broken bytes, special tokens between others, characters never finished."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(streamed(tokenizer, ids)) == whole


def test_stream_decoder_says_what_was_cut_within_a_character(tokenizer):
    ids = tokenizer("x日", add_special_tokens=False)["input_ids"][:-1]
    assert streamed(tokenizer, ids)[-1] == "\ufffd"


def test_stream_decoder_keeps_sentencepiece_spaces():
    """Tokens whose leading space vanishes where they stand first in a text, which an answer does
    not; byte tokens, special tokens.
    """
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "▁Hello", "▁wide", "▁world", "!", *(f"<0x{b:02X}>" for b in range(256))]
    raw = Tokenizer(models.Unigram([(w, -1.0) for w in words], unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    euro = [5 + b for b in "€".encode()]
    pieces = streamed(tokenizer, [1, 0, 2, *euro, 3, 4])
    assert pieces == [" Hello", "", " wide", "", "", "€", " world", "!", ""]
