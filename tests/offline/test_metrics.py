"""Exact match, token F1 and numbers, with values worked out by hand."""

from decimal import Decimal

import pytest

from dschat.offline.metrics import exact_match, last_number, normalized, numeric_match, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("a cat, an owl\tand THE dog.", "cat owl and dog"),
        ("Anna theatre", "anna theatre"),  # articles are whole words
        ("  ...  ", ""),
    ],
)
def test_normalization(text, expected):
    assert normalized(text) == expected


def test_exact_match_takes_any_reference():
    assert exact_match("The answer!", ["no", "answer"]) == 1.0
    assert exact_match("answers", ["answer"]) == 0.0
    assert exact_match("x", []) == 0.0


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("the cat sat", ["a cat sat down"], 0.8),  # 2 common of 2 and 3: P 1, R 2/3
        ("cat cat dog", ["cat bird"], 0.4),  # a repeated word counts once: P 1/3, R 1/2
        ("red", ["blue", "Red."], 1.0),  # the closest reference
        ("", ["the"], 1.0),  # both are empty once normalized
        ("", ["cat"], 0.0),
    ],
)
def test_token_f1(answer, references, expected):
    assert token_f1(answer, references) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("4,9,17", "17"),
        ("It costs $1,234.50, all in.", "1234.50"),
        ("minus: -3", "-3"),
        ("5-3", "3"),
        ("1,000,5", "5"),
        ("#### 0.50", "0.5"),
        ("no number", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == (None if expected is None else Decimal(expected))


def test_numeric_match():
    assert numeric_match("first 8, then 1,000", ["#### 1000.0"]) == 1.0
    assert numeric_match("1000 or 999", ["1000"]) == 0.0
    assert numeric_match("none", ["none"]) == 0.0
