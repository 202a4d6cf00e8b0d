"""Compares an answer with reference answers: exact match, numbers, token F1.

Exact match and F1 are those of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1, and its
evaluate-v1.1.py): both sides are normalized, and the best of several references counts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
# A sign counts unless it subtracts; commas count between groups of three digits.
_NUMBER = re.compile(
    r"(?<![\w.,])[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!,?\d)|(?:(?<!\w)[-+])?\d+(?:\.\d+)?"
)


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space: SQuAD's normalization."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the normalized answer equals a normalized reference, else 0."""
    return float(normalized(answer) in map(normalized, references))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the answer's words, by the closest reference."""
    return max((_f1(normalized(answer), normalized(text)) for text in references), default=0.0)


def numeric_match(answer: str, references: Sequence[str]) -> float:
    """1 if the last number of the answer equals the last number of a reference, else 0.

    As for GSM8K (Cobbe et al. 2021, arXiv 2110.14168); 1,000 is 1000, and 0.50 is 0.5.
    """
    number = last_number(answer)
    return float(number is not None and number in map(last_number, references))


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``; None without one."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _f1(answer: str, reference: str) -> float:
    words, wanted = answer.split(), reference.split()
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return float(words == wanted)  # two empty texts agree, as in SQuAD 2
    return 2 * common / (len(words) + len(wanted))
