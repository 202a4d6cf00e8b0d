"""An environment and an agent for runs that are killed: what they say depends on the answers."""

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


async def play(client, prompt):
    """Two rows: a question with a second one after the answer, and another conversation."""
    for text in (prompt, f"Say {prompt} again."):
        messages = [{"role": "user", "content": text}]
        for _ in range(2):
            asked = {"model": "actor", "messages": messages, "max_tokens": 3}
            answer = (await client.chat.completions.create(**asked)).choices[0].message
            messages += [answer, {"role": "user", "content": f"Why {len(answer.content)}?"}]
    return {"reward": len(set(answer.content)) / 10 - 0.5}
