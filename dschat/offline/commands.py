"""The commands ``dschat generate`` and ``dschat eval``.

They parse before torch loads: ``--help`` and mistyped flags answer at once.
"""

from dschat.config import parser
from dschat.offline.flags import EvalConfig, GenerateConfig


def run_generate() -> None:
    config = parser.parse(GenerateConfig)

    from dschat.observability import console
    from dschat.offline.generate import generate

    console.setup(hold=True)
    generate(config)


def run_eval() -> None:
    config = parser.parse(EvalConfig)

    from dschat.observability import console
    from dschat.offline.evaluate import evaluate

    console.setup(hold=True)
    results = evaluate(config)
    if config.out is not None:
        results.write(config.out)
    console.write_output(results.text())
