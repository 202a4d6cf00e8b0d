"""Games of guessing a number: rows for SFT, and the environment that plays them in step 3.

    python examples/guess_game.py                 # the rows, into output/data/guess_game
    python train.py --recipe game

A prompt names a game, ``game 47110: 1-15``. The environment thinks of a number in that range, and
replies to a guess with ``higher: 9-15`` or ``lower: 1-7``: the numbers that are left. Halving them
finds every number in four guesses. The games that SFT imitates are careless: one guess in two
ignores the replies. So SFT learns to play, and finds a third of the numbers in four guesses. A
reward for early finds then teaches the model to read the replies, and to halve.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

NUM_ROWS = {"train": 12_000, "eval": 500}
LOWEST, HIGHEST = 1, 15

_CARELESS = 0.5  # share of the guesses in a demonstration that ignore the replies
_SHOWN = 4  # guesses in a demonstration, at most
_LATE = 0.1  # reward that every further guess costs


class GuessGame:
    """Rewards the right number with 1, less 0.1 for each guess before it."""

    def reset(self, number: int) -> None:
        self._number, self._guesses = number, 0
        self.left = (LOWEST, HIGHEST)

    def step(self, answer: str) -> tuple[str, float, bool]:
        found = re.search(r"\d+", answer)
        guess = int(found[0]) if found else None
        if guess == self._number:
            return "", 1.0 - _LATE * self._guesses, True
        self._guesses += 1
        low, high = self.left
        if guess is None:
            hint = "guess a number"
        elif guess < self._number:
            hint, low = "higher", max(low, guess + 1)
        else:
            hint, high = "lower", min(high, guess - 1)
        self.left = (low, high)
        return f"{hint}: {low}-{high}", 0.0, False


def guess_rows(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits: 12,000 in ``"train"``, 500 in ``"eval"``.

    Every row is ``{prompt, number, demonstration}``, such as ``game 47110: 1-15``, 9 and the chat
    messages of a game after the prompt. The same seed gives the same rows on every machine; prompts
    are unique over both splits.
    """
    rng = random.Random(seed)
    names = iter(rng.sample(range(10_000, 100_000), sum(NUM_ROWS.values())))
    return {
        split: [_row(rng, next(names)) for _ in range(count)] for split, count in NUM_ROWS.items()
    }


def _row(rng: random.Random, name: int) -> dict[str, Any]:
    number = rng.randint(LOWEST, HIGHEST)
    return {
        "prompt": f"game {name}: {LOWEST}-{HIGHEST}",
        "number": number,
        "demonstration": _careless_game(rng, number),
    }


def _careless_game(rng: random.Random, number: int) -> list[dict[str, str]]:
    """The turns of a game, from the first to the last guess."""
    game = GuessGame()
    game.reset(number)
    turns: list[dict[str, str]] = []
    for _ in range(_SHOWN):
        careless = rng.random() < _CARELESS
        guess = str(rng.randint(*((LOWEST, HIGHEST) if careless else game.left)))
        reply, _, found = game.step(guess)
        turns.append({"role": "assistant", "content": guess})
        if found:
            return turns
        turns.append({"role": "user", "content": reply})
    return turns[:-1]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "output/data/guess_game")
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in guess_rows().items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
