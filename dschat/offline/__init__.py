"""Batch generation and evaluation over local files.

flags     of ``dschat generate`` and ``dschat eval``
generate  a data set -> its rows with answers, and their scores
evaluate  models and answer files -> metrics, intervals, paired differences
rows      --data_path -> rows with tokenized prompts; the file of answers that a killed command
          continues
"""

from dschat.config import parser
from dschat.offline.flags import EvalConfig, GenerateConfig, ReplayConfig


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


def run_replay() -> None:
    config = parser.parse(ReplayConfig, takes_file=False, first="run")

    import dschat.distributed as dist
    from dschat.observability import console
    from dschat.rlhf.replay import replay

    console.setup("warning")
    dist.init()
    replay(config.run, config.iteration, config.out)
    dist.shutdown()
