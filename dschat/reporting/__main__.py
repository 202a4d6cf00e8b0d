"""``dschat report OUT [OTHER...]``: writes OUT/report.html, and says so."""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

import sys

from dschat.config import parser
from dschat.config.report import ReportConfig
from dschat.distributed import entrypoint


def main() -> None:
    config = parser.parse(ReportConfig, takes_file=False, first="runs")

    from dschat.reporting.page import write_report

    sys.stdout.write(write_report(config) + "\n")


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
