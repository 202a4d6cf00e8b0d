"""The environment of `episodes.py`. No torch here: worker processes import it."""

import time

TURNS = 4


class Replies:
    """Ends after ``TURNS`` answers. ``busy_ms``: milliseconds in which a step computes in Python,
    of the thread's own time.
    """

    def reset(self, busy_ms: float) -> None:
        self.turns, self.busy_s = 0, busy_ms / 1000

    def step(self, answer: str) -> tuple[str, float, bool]:
        end = time.thread_time() + self.busy_s
        while time.thread_time() < end:
            sum(range(1000))
        self.turns += 1
        return answer, 0.0, self.turns == TURNS
