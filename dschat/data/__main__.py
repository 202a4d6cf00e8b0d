"""``python -m dschat.data PATH...``: prints what each training step would make of some data.

The report goes to standard output, at most 100 columns wide; see ``inspect.py``.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

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
    console.write_output(report + "\n")


def _with_flag(argv: list[str]) -> list[str]:
    """Adds ``--data_path`` if paths come first without it."""
    return ["--data_path", *argv] if argv and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    entrypoint.run(main)
