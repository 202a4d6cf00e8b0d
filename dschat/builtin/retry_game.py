"""An environment for ``builtin/arithmetic``: says whether an answer is right, and allows another
attempt.
"""

import re

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
