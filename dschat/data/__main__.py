"""``python -m dschat.data PATH...``: prints what each training step would make of some data.

The report goes to standard output, at most 100 columns wide; see ``inspect.py``.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

import os
import sys

from dschat.config import parser
from dschat.config.data import ShowConfig
from dschat.distributed import entrypoint


def main() -> None:
    # Parse before torch loads: --help and mistyped flags answer at once.
    config = parser.parse(ShowConfig, _with_flag(sys.argv[1:]), takes_file=False)

    from dschat.builtin.tiny_model import resolve_model
    from dschat.data.inspect import show
    from dschat.models.tokenizer import load_tokenizer
    from dschat.observability import console

    console.setup("error")
    tokenizer = load_tokenizer(resolve_model(config.model), "--model", config.trust_remote_code)
    report = "\n".join(show(config, tokenizer))  # raises before any output
    try:
        sys.stdout.write(report + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_flag(argv: list[str]) -> list[str]:
    """Adds ``--data_path`` if paths come first without it."""
    return ["--data_path", *argv] if argv and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    entrypoint.run(main)
