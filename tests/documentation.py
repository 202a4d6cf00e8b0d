"""Reads the pages of docs/ and the README, and the flags that they may name."""

import re
from pathlib import Path

from dschat.chat.load import ChatConfig
from dschat.config import parser
from dschat.config.data import ShowConfig
from dschat.launch import recipe
from dschat.offline.flags import EvalConfig, GenerateConfig, ReplayConfig
from dschat.reporting.__main__ import ReportConfig
from dschat.serving.flags import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
CONFIGS = {n: step.config_class for n, step in recipe.STEPS.items()}
FLAGS = {n: parser.flag_names(config) for n, config in CONFIGS.items()}
COMMANDS = {
    "serve": ServeConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
    "replay": ReplayConfig,
    "report": ReportConfig,
}
TRAIN_FLAGS = set().union(parser.flag_names(recipe.TrainConfig), *FLAGS.values())
BENCHMARKS = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
OTHER_FLAGS = {"gpus_per_node", "gpus_per_task", *re.findall(r'"--(\w+)"', BENCHMARKS)}  # SLURM's
ALL_FLAGS = TRAIN_FLAGS.union(
    *map(parser.flag_names, (ShowConfig, ChatConfig, *COMMANDS.values())),
    {"help", "config"},
    OTHER_FLAGS,
)


def text_of(name: str) -> str:
    return PAGES.get(name) or (ROOT / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def inline(page: str) -> list[str]:
    """What stands between single backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))


def tables(page: str, *header: str) -> list[list[str]]:
    """The rows of the tables whose header ends so."""
    rows, wanted = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            wanted = False
        elif tuple(cells[-len(header) :]) == header:
            wanted = True
        elif wanted and not set(line) <= set("|-: "):
            rows.append(cells)
    return rows


def known_flag(name: str) -> bool:
    prefix, _, name = name.replace("-", "_").rpartition(".")
    if prefix:
        return name in FLAGS[int(prefix.removeprefix("step"))]
    return name in ALL_FLAGS
