"""``dschat report OUT [OTHER...]``: writes OUT/report.html, and says so."""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import sys
from dataclasses import dataclass

from dschat.config import parser
from dschat.config.errors import require
from dschat.config.fields import flag, require_valid
from dschat.distributed import entrypoint


@dataclass
class ReportConfig:
    """Write OUT/report.html, a page about finished or running training."""

    runs: list[str] = flag(
        [],
        "Output folders of train.py or of single steps, or NAME=FOLDER (may come first, without "
        "the flag). The report is written into the first one; the others are drawn beside it.",
        short=True,
    )

    def validate(self) -> None:
        require(bool(self.runs), "name a folder: dschat report OUT [OTHER...]")
        require_valid(self)


def main() -> None:
    config = parser.parse(ReportConfig, takes_file=False, first="runs")

    from dschat.reporting.page import write_report

    sys.stdout.write(write_report(config.runs) + "\n")


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
