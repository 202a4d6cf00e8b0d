"""Compares the lines of each package of dschat/ with its budget in pyproject.toml; `make lint`.

A budget is raised in the pull request that needs it, where a reviewer sees it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parents[1]


def over_budget(root: Path = HERE) -> list[str]:
    """A line for each package that is over its budget, or has none."""
    table = (root / "pyproject.toml").read_text().partition("[tool.dschat.lines]\n")[2]
    rows = [line.split(" = ") for line in table.partition("\n\n")[0].splitlines()]
    budgets, problems = {name: int(most) for name, most in rows}, []
    folders = [path.parent for path in sorted((root / "dschat").glob("*/__init__.py"))]
    for package in (root / "dschat", *folders):
        files = package.glob("*.py") if package.name == "dschat" else package.rglob("*.py")
        count = sum(len(path.read_text().splitlines()) for path in files)
        if count > (most := budgets.get(package.name, 0)):
            problems.append(f"dschat/{package.name}: {count} lines, budget {most}")
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(over_budget()) or None)
