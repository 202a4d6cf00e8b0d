"""Shows the progress of `dschat generate` and `dschat eval`."""

import logging
import sys
import time

from dschat.observability import console

logger = logging.getLogger("dschat")

_INTERVAL_S = 30.0  # between two log lines


class Progress:
    """Shows progress: a bar on a terminal, else a log line every half minute.

    Args:
        total, done: prompts, over all starts of the command.
    """

    def __init__(self, total: int, done: int, description: str) -> None:
        self._total, self._done, self._first = total, done, done
        self._description, self._tokens = description, 0
        self._started = self._logged = time.monotonic()
        self._bar = console.progress(total, description, done=done)

    def advance(self, prompts: int, tokens: int) -> None:
        """Add answered prompts, with the tokens of their answers."""
        self._done += prompts
        self._tokens += tokens
        rate = self._tokens / self._elapsed_s
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(prompts)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged >= _INTERVAL_S:
            self._logged = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """``answers: 512 of 3,000 prompts, 1,234 tokens/s, 75 s left``"""
        new, elapsed_s = self._done - self._first, self._elapsed_s
        left_s = (self._total - self._done) * elapsed_s / max(new, 1)
        left = f", {left_s:.0f} s left" if self._done < self._total else ""
        return (
            f"{self._description}: {self._done:,} of {self._total:,} prompts, "
            f"{self._tokens / elapsed_s:,.0f} tokens/s{left}"
        )

    def close(self) -> None:
        self._bar.close()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)
