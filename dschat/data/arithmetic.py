"""``builtin/arithmetic``: sums and differences, whose answers a program can check, from one seed.

Comes in: a seed. Goes out: rows of text, ``prompt, reference, demonstration``, in two splits: of
all sums and differences of two-digit numbers that have at most two digits themselves, 500 in eval
and the others in train. So the answers to eval prompts cannot be known, only worked out. The
reference is the right answer; a demonstration, what SFT imitates, is a lazy pupil's, who often
rounds down or gives up: one who imitates him is right in about one case out of three.

This module must not know tokenizers, models or rewards: it needs the standard library alone.
"""

import random

NUM_EVAL = 500

# How often the pupil does what.
_SHARES = {"works it out": 0.36, "rounds": 0.34, "gives up": 0.30}
_GIVES_UP = "?"


def arithmetic_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The rows of both splits: 6,835 in ``"train"``, 500 in ``"eval"``, each in a shuffled order.

    Every row is ``{prompt, reference, demonstration}``, all text, such as ``47+38=``, ``85`` and
    ``80``. The same seed gives the same rows on every machine; prompts are unique over both splits.
    """
    rng = random.Random(seed)
    numbers = range(10, 100)
    results = {f"{a}+{b}=": a + b for a in numbers for b in numbers if a + b < 100}
    results |= {f"{a}-{b}=": a - b for a in numbers for b in numbers if a >= b}
    rows = [_row(rng, prompt, result) for prompt, result in results.items()]
    rng.shuffle(rows)
    return {"train": rows[NUM_EVAL:], "eval": rows[:NUM_EVAL]}


def _row(rng: random.Random, prompt: str, result: int) -> dict[str, str]:
    answers = {
        "works it out": str(result),
        "rounds": str(result // 10 * 10),
        "gives up": _GIVES_UP,
    }
    (way,) = rng.choices(tuple(_SHARES), tuple(_SHARES.values()))
    return {"prompt": prompt, "reference": str(result), "demonstration": answers[way]}
