"""The environment of the cases that run in two processes."""

import random


class Replies:
    """Replies with one to three words that depend on the seed and the answer; ends after one to
    four turns.
    """

    def reset(self, seed):
        self.random = random.Random(seed)
        self.turns = self.random.randint(1, 4)

    def step(self, answer):
        self.turns -= 1
        words = answer.split()
        reply = [f"w{self.random.randint(2, 63)}" for _ in range(self.random.randint(1, 3))]
        reward = 0.25 * len(words) + 0.5 * (len(set(words)) % 2)
        return " ".join([*reply, *words[-1:]]), reward, self.turns == 0
