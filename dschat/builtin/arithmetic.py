"""``builtin/arithmetic``: sums and differences, whose answers a program can check, from one seed.

Comes in: a seed. Goes out: rows of text, ``prompt, reference, demonstration``, in two splits. What
is asked is a sum and difference of four digits, ``7-3+5+8=``: few enough to be learned in a minute,
too many to be learned by heart. The reference is the result. A demonstration, what SFT imitates, is
an impatient pupil's, who works it out step by step, ``4,9,17``, but as often stops too early. So
SFT learns to calculate, and to get there in one case out of three; what remains to be learned from
a reward for the right result is to go on to the end, and to make no mistake on the way.

This module must not know tokenizers, models or rewards: it needs the standard library alone.
"""

import itertools
import random

NUM_ROWS = {"train": 24_000, "eval": 500}

# After how many of the three steps the pupil stops, and how often.
_STOPS = {1: 0.33, 2: 0.33, 3: 0.34}


def arithmetic_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The rows of both splits: 24,000 in ``"train"``, 500 in ``"eval"``, in a shuffled order.

    Every row is ``{prompt, reference, demonstration}``, all text, such as ``7-3+5+8=``, ``17`` and
    ``4,9``. Digits are 1 to 9, no step falls below 0. The same seed gives the same rows on every
    machine; prompts are unique over both splits.
    """
    rng = random.Random(seed)
    drawn = rng.sample(_questions(), sum(NUM_ROWS.values()))
    rows = iter([_row(rng, prompt, steps) for prompt, steps in drawn])
    return {split: list(itertools.islice(rows, number)) for split, number in NUM_ROWS.items()}


def _questions() -> list[tuple[str, list[int]]]:
    """Every prompt there is, and the results of its three steps."""
    found = []
    for signs in itertools.product((1, -1), repeat=3):
        for first, *others in itertools.product(range(1, 10), repeat=4):
            terms = [sign * digit for sign, digit in zip(signs, others, strict=True)]
            steps = list(itertools.accumulate(terms, initial=first))[1:]
            if min(steps) >= 0:
                found.append((f"{first}{''.join(f'{term:+}' for term in terms)}=", steps))
    return found


def _row(rng: random.Random, prompt: str, steps: list[int]) -> dict[str, str]:
    (stop,) = rng.choices(tuple(_STOPS), tuple(_STOPS.values()))
    shown = ",".join(str(step) for step in steps[:stop])
    return {"prompt": prompt, "reference": str(steps[-1]), "demonstration": shown}
