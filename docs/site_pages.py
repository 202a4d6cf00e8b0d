"""Hooks of mkdocs, see mkdocs.yml: pages of the public names and of the flags, and links out of
docs/.
"""

import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CONFIGS = ("SFTConfig", "RewardConfig", "RLHFConfig")
MODULES = {
    "Reward functions": ["dschat.rewards.library", "dschat.rewards.judge"],
    "Losses and advantages": [
        "dschat.losses.advantages",
        "dschat.losses.policy",
        "dschat.losses.preference",
    ],
}


def on_files(files: Files, config: Any) -> None:
    sys.path.insert(0, str(Path(config.config_file_path).parent))
    files.append(File.generated(config, "api.md", content="\n".join(api())))
    files.append(File.generated(config, "flags.md", content="\n".join(flags())))


def api() -> list[str]:
    from dschat import _EXPORTS  # loads no library

    page = ["# API", "", "What `import dschat` gives, and modules that are named by their paths."]
    page += ["The fields of the three configurations are [the flags](flags.md).", "", "## dschat"]
    for name, module in _EXPORTS.items():
        page += ["", f"::: {module}.{name}"]
        if name in CONFIGS:
            page += ["    options:", "      inherited_members: false", "      members: []"]
    for title, modules in MODULES.items():
        page += ["", f"## {title}", "", *(f"::: {module}" for module in modules)]
    return page


def flags() -> list[str]:
    from dschat import config

    found: dict[str, tuple[Any, list[str]]] = {}
    for step, name in enumerate(CONFIGS, 1):
        for f in fields(getattr(config, name)):
            found.setdefault(f.name, (f, []))[1].append(str(step))
    page = ["# Flags", "", "Of the steps that have them; as `--help all` shows them.", ""]
    page += ["| flag | steps | default | |", "|---|---|---|---|"]
    for name, (f, steps) in sorted(found.items()):
        value = f.default_factory() if f.default is MISSING else f.default
        shown = "" if value in (None, "") else f"`{value}`"
        cells = f"`--{name}`", " ".join(steps), shown, f.metadata.get("help", "")
        page.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return page


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Files outside of docs/ are read on GitHub."""
    up = "../" * page.file.src_uri.count("/") + "../"
    return markdown.replace(f"]({up}", f"]({config.repo_url}/blob/main/")
