"""Finding a thought takes time in proportion to the text: a client of the server chooses it."""

import re
from itertools import product

import pytest

from dschat.data.rendering import THINK

# The same, told simply; its time grows with the cube of a text's spaces.
PLAIN = re.compile(r"\s*(?:<think>)?\s*((?:(?!<think>).)*?)\s*</think>\s*", re.DOTALL)
PIECES = ["<think>", "</think>", " ", "\n", "a", "<", "think>"]


def found(pattern, text):
    match = pattern.match(text)
    return match and (match[0], match[1])


def test_against_the_plain_pattern():
    texts = ["".join(pieces) for k in range(6) for pieces in product(PIECES, repeat=k)]
    assert [t for t in texts if found(THINK, t) != found(PLAIN, t)] == []


@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000,
        "a" + " " * 200_000,
        "<think>" + " " * 200_000 + "<think></think>",
        (" " * 400 + "a") * 500,
        "<think>" * 30_000,
    ],
)
def test_a_long_text_without_a_thought(text):
    """A pattern that tries its spaces again and again would take hours."""
    assert not (found := THINK.match(text)) or found[1] == ""
