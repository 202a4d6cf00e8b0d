"""Shows the progress of generation: a bar on a terminal, else a log line every half minute."""

import logging
import sys
import time

from dschat.observability import console

logger = logging.getLogger("dschat")

_INTERVAL_S = 30.0


class Progress:
    """Counts prompts and tokens.

    Args:
        total, done: prompts, over all starts of the command.
    """

    def __init__(self, total: int, done: int, description: str) -> None:
        self._total, self._done, self._first = total, done, done
        self._description = description
        self._tokens = 0
        self._started = self._logged = time.monotonic()
        self._bar = console.progress(total, description, done=done)

    def advance(self, prompts: int, tokens: int) -> None:
        """Add answered prompts, with the tokens of their answers."""
        self._done += prompts
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._tokens_per_s:,.0f} tokens/s", refresh=False)
        self._bar.update(prompts)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged >= _INTERVAL_S:
            self._logged = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """``answers: 512 of 3,000 prompts, 1,234 tokens/s, 75 s left``"""
        new = self._done - self._first
        left_s = (self._total - self._done) * self._elapsed_s / new if new else 0.0
        left = f", {left_s:.0f} s left" if self._done < self._total else ""
        return (
            f"{self._description}: {self._done:,} of {self._total:,} prompts, "
            f"{self._tokens_per_s:,.0f} tokens/s{left}"
        )

    def close(self) -> None:
        self._bar.close()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def _tokens_per_s(self) -> float:
        return self._tokens / self._elapsed_s
