"""``python -m dschat.data PATH...``: show what data turns into, before a step is run on it.

Comes in: paths and data flags. Goes out: a report on standard output, at most 100 columns wide. It
must not know what the report says.
"""

import os
import sys

from dschat.config import parser
from dschat.config.data import ShowConfig
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. Only then does torch load: --help and typing errors answer at once.
    config = parser.parse(ShowConfig, _with_flag(sys.argv[1:]), takes_file=False)

    from dschat.builtin.tiny_model import resolve_model
    from dschat.data.inspect import show
    from dschat.models.tokenizer import load_tokenizer
    from dschat.observability import console

    console.setup("error")
    tokenizer = load_tokenizer(resolve_model(config.model), "--model", config.trust_remote_code)
    report = "\n".join(show(config, tokenizer))  # all of it, or the mistake alone
    try:
        sys.stdout.write(report + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_flag(argv: list[str]) -> list[str]:
    """Paths may stand first, without their ``--data_path``."""
    return ["--data_path", *argv] if argv and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    entrypoint.run(main)
