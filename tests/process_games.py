"""Environments and tools that worker processes import. No torch here."""

import os
import random
import re
import sys

VOCAB = 64


class Replies:
    """Replies with two tokens that depend on the answer, ends after a drawn number of turns."""

    def reset(self, prompt, seed):
        self.turns = random.Random(seed).randint(1, 4)

    def step(self, answer):
        self.turns -= 1
        count = len(answer.split())
        return f"{count % VOCAB} {(7 * count) % VOCAB}", 0.25 * count, self.turns == 0


class Tells:
    """Says which process it is in, how many steps it has had, and what the process imported."""

    def reset(self, level):
        self.level, self.steps, self.home = level, 0, os.getpid()

    def step(self, answer):
        self.steps += 1
        heavy = sorted({"torch", "transformers"} & set(sys.modules))
        return f"{os.getpid()} {self.home} {self.level} {self.steps} {heavy}", 0.5, answer == "end"

    def get_reward(self):
        return 10.0 * self.steps


class Fails:
    """Ends its process, or holds the interpreter, or raises, as the answer says."""

    def step(self, answer):
        if answer == "die":
            os._exit(7)
        if answer == "hang":
            re.match("(a+)+b", "a" * 64)
        if answer == "raise":
            raise ValueError("no luck")
        return answer, 0.0, False


def hangs(text: str) -> str:
    """Holds the interpreter, if told to.

    Args:
        text: What to do.
    """
    if text == "hang":
        re.match("(a+)+b", "a" * 64)
    return text
