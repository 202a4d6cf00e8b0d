"""``builtin/arithmetic``: sums and differences, whose answers a program can check, from one seed.

Comes in: a seed. Goes out: rows of text, ``prompt, reference, demonstration``, in two splits. What
is asked is a sum and difference of four digits, such as ``7-3+5+8=``: few enough to be learned in a
minute, too many to be learned by heart. The reference is the right answer; a demonstration, what
SFT imitates, is that of a pupil who doubts: a third of the time he gives the right answer, a third
with a question mark behind it, else a question mark alone. So SFT learns to calculate, and to be
right in a third of all cases; what an exact match rewards is to answer as well as one can.

This module must not know tokenizers, models or rewards: it needs the standard library alone.
"""

import itertools
import random

NUM_ROWS = {"train": 24_000, "eval": 500}

# How often the pupil does what.
_SHARES = {"answers": 0.36, "doubts": 0.34, "passes": 0.30}


def arithmetic_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The rows of both splits: 24,000 in ``"train"``, 500 in ``"eval"``, in a shuffled order.

    Every row is ``{prompt, reference, demonstration}``, all text, such as ``7-3+5+8=``, ``17`` and
    ``17?``. Digits are 1 to 9, results 0 to 36. The same seed gives the same rows on every machine;
    prompts are unique over both splits.
    """
    rng = random.Random(seed)
    drawn = rng.sample(_questions(), sum(NUM_ROWS.values()))
    rows = iter([_row(rng, prompt, result) for prompt, result in drawn])
    return {split: list(itertools.islice(rows, number)) for split, number in NUM_ROWS.items()}


def _questions() -> list[tuple[str, int]]:
    """Every prompt that has a result of 0 or more, and the result."""
    found = []
    for signs in itertools.product((1, -1), repeat=3):
        for first, *others in itertools.product(range(1, 10), repeat=4):
            terms = [sign * digit for sign, digit in zip(signs, others, strict=True)]
            result = first + sum(terms)
            if result >= 0:
                found.append((f"{first}{''.join(f'{term:+}' for term in terms)}=", result))
    return found


def _row(rng: random.Random, prompt: str, result: int) -> dict[str, str]:
    says = {"answers": f"{result}", "doubts": f"{result}?", "passes": "?"}
    (way,) = rng.choices(tuple(_SHARES), tuple(_SHARES.values()))
    return {"prompt": prompt, "reference": str(result), "demonstration": says[way]}
