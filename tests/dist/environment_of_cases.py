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


class Failing(Replies):
    """Fails now and then."""

    def step(self, answer):
        if self.random.random() < 0.3:
            raise ValueError(f"no luck {self.random.randint(2, 63)}")
        return super().step(answer)


class FailingOnce(Replies):
    """Fails at the prompt w3 w3 w3 alone."""

    def reset(self, prompt, seed):
        super().reset(seed)
        self.fails = prompt == "w3 w3 w3"

    def step(self, answer):
        if self.fails:
            raise ValueError("no luck with this prompt")
        return super().step(answer)
