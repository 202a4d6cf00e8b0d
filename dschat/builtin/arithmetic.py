"""Generates ``builtin/arithmetic``: sums and differences with verifiable answers, from one seed;
``builtin/addition``, for models that know English; and an environment that says whether an answer
is right, and allows another attempt.

A prompt adds and subtracts four digits, ``7-3+5+8=``: the task is learned in a minute but has too
many prompts to memorise. The reference is the result. A demonstration, which SFT imitates, lists
the partial results, ``4,9,17``, but two out of three stop early. So SFT learns to calculate and
reaches the result in one case out of three. A reward for the right result then teaches the model to
finish and to calculate without mistakes.
"""

import itertools
import random
import re

NUM_ROWS = {"train": 24_000, "eval": 500}

# Steps that a demonstration shows, out of three -> its share of the rows.
_STOPS = {1: 0.33, 2: 0.33, 3: 0.34}


def arithmetic_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The rows of both splits: 24,000 in ``"train"``, 500 in ``"eval"``, shuffled.

    Every row is ``{prompt, reference, demonstration}``, all text, such as ``7-3+5+8=``, ``17`` and
    ``4,9``. Digits are 1 to 9; no partial result is negative. The same seed gives the same rows on
    every machine; prompts are unique over both splits.
    """
    rng = random.Random(seed)
    drawn = rng.sample(_questions(), sum(NUM_ROWS.values()))
    rows = iter([_row(rng, prompt, steps) for prompt, steps in drawn])
    return {split: list(itertools.islice(rows, number)) for split, number in NUM_ROWS.items()}


def addition_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Sums of two numbers of two digits, in words: 2,000 rows in ``"train"``, 200 in ``"eval"``.

    Every row is ``{prompt, reference}``, such as ``What is 45 plus 76? Answer with the number
    only.`` and ``121``. No two rows have the same numbers, in either order.
    """
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    drawn = [random.Random(seed).sample(pairs, len(pairs)), itertools.cycle(((0, 1), (1, 0)))]
    rows = [
        {
            "prompt": f"What is {pair[i]} plus {pair[j]}? Answer with the number only.",
            "reference": str(sum(pair)),
        }
        for pair, (i, j) in zip(*drawn, strict=False)
    ]
    return {"train": rows[:2000], "eval": rows[2000:2200]}


def _questions() -> list[tuple[str, list[int]]]:
    """All prompts, each with its three partial results."""
    questions = []
    for signs in itertools.product((1, -1), repeat=3):
        for first, *others in itertools.product(range(1, 10), repeat=4):
            terms = [sign * digit for sign, digit in zip(signs, others, strict=True)]
            steps = list(itertools.accumulate(terms, initial=first))[1:]
            if min(steps) >= 0:
                questions.append((f"{first}{''.join(f'{term:+}' for term in terms)}=", steps))
    return questions


def _row(rng: random.Random, prompt: str, steps: list[int]) -> dict[str, str]:
    (stop,) = rng.choices(tuple(_STOPS), tuple(_STOPS.values()))
    shown = ",".join(str(step) for step in steps[:stop])
    return {"prompt": prompt, "reference": str(steps[-1]), "demonstration": shown}


_LATE = 0.2  # reward that every further attempt costs


class RetryGame:
    """Rewards the right result with 1, less 0.2 for each attempt before it."""

    def reset(self, reference: str) -> None:
        self._reference, self._attempts = reference, 0

    def step(self, answer: str) -> tuple[str, float, bool]:
        numbers = re.findall(r"\d+", answer)
        if numbers and numbers[-1] == self._reference:
            return "", 1.0 - _LATE * self._attempts, True
        self._attempts += 1
        return "no", 0.0, False
