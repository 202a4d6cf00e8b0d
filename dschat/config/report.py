"""Declares the flags of ``dschat report``."""

from dataclasses import dataclass

from dschat.config.errors import require
from dschat.config.fields import flag, require_bounds, require_types

PAGE = "report.html"


@dataclass
class ReportConfig:
    """Write OUT/report.html, a page about finished or running training."""

    runs: list[str] = flag(
        [],
        "Output folders of train.py or of single steps (may come first, without the flag). The "
        "report is written into the first one; the others are drawn in the same figures.",
        short=True,
    )
    max_points: int = flag(1000, "Points per curve; longer curves are thinned.", short=True, ge=2)

    def validate(self) -> None:
        require(bool(self.runs), "name a folder: dschat report OUT [OTHER...]")
        require_types(self)
        require_bounds(self)
