"""An environment for runs that are killed: its replies depend on the seed and the answer."""

import random


class Talker:
    """Ends after one to three turns, or sooner where the answer is short."""

    def reset(self, prompt, seed):
        self.random = random.Random(seed)
        self.words = prompt.split()
        self.turns = self.random.randint(1, 3)

    def step(self, answer):
        self.turns -= 1
        reply = " ".join(self.random.choices(self.words, k=self.random.randint(1, 4)))
        return reply, len(set(answer)) / 10 - 0.5, self.turns <= 0
