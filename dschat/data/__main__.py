"""``python -m dschat.data PATH...``: prints what each training step would make of some data.

The report goes to standard output, at most 100 columns wide; see ``inspect.py``.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

from dschat.config import parser
from dschat.config.data import ShowConfig
from dschat.distributed import entrypoint


def main() -> None:
    # Parse before torch loads: --help and mistyped flags answer at once.
    config = parser.parse(ShowConfig, takes_file=False, first="data_path")

    from dschat.data.inspect import show
    from dschat.models.tokenizer import load_tokenizer
    from dschat.observability import console

    console.setup("error")
    tokenizer = load_tokenizer(
        config.model, "--model", config.trust_remote_code, **config.template_flags
    )
    report = console.printable("\n".join(show(config, tokenizer)))  # raises before any output
    console.write_output(report + "\n")


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
