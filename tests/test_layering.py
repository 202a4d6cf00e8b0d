"""The layers of the house, read from the source: who may import whom, and who may touch what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dschat"

# A module imports lower layers, and in its own layer what stands before it; siblings of layers 2
# and 4 never import each other. Packages count as one module.
LAYERS = (
    (
        "knobs",
        "text_file",
        "shared_memory",
        "host_memory",
        "disk_space",
        "contents",
        "rollout_config",
        "data_config",
        "deepspeed_file",
        "deepspeed_config",
        "learning_config",
        "reward_config",
        "preference_config",
        "config",
        "checkpoint_tensors",
        "losses",
    ),
    (
        "lifeline",
        "dist",
        "environment",
        "output_dir",
        "register",
        "stopping",
        "cli",
        "rollout",
        "sampling",
        "log",
        "metrics",
        "chat_template",
        "model_files",
    ),
    ("data", "models", "inference", "reward_programs"),
    (
        "builtin_model",
        "builtin_eval",
        "deepspeed_setup",
        "optimizer_step",
        "hybrid",
        "checkpoint",
        "resume",
        "continuation",
    ),
    ("supervised", "preference", "rlhf", "chat"),
    (
        "plan",
        "nodes",
        "recipe",
        "road",
        "finished",
        "unfinished",
        "watchdog",
        "running",
        "launch",
        "summary",
        "show_data",
    ),
)
NO_SIBLINGS = (2, 4)
MAY_IMPORT_DEEPSPEED = {"deepspeed_setup", "hybrid", "checkpoint"}
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}

PLACE = {name: (layer, row) for layer, names in enumerate(LAYERS) for row, name in enumerate(names)}
FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])


def module_of(path: Path) -> str:
    """``data`` for dschat/data/gold.py, ``cli`` for dschat/cli.py."""
    if path == PACKAGE / "data" / "__main__.py":  # a command, named after what it is about
        return "show_data"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that the module imports, anywhere in it, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write it out"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def may_import(importer: str, imported: str) -> bool:
    """Whether the table lets ``importer`` import ``imported``."""
    (layer, row), (other_layer, other_row) = PLACE[importer], PLACE[imported]
    if importer == imported or other_layer < layer:
        return True
    return other_layer == layer and other_row < row and layer not in NO_SIBLINGS


def offences(path: Path, source: str) -> list[str]:
    """What in ``source``, taken as the file ``path`` of the package, the house does not allow."""
    tree, module, found = ast.parse(source), module_of(path), []
    for name, line in imports(tree):
        root, _, rest = name.partition(".")
        imported = rest.partition(".")[0]
        if root == "deepspeed" and module not in MAY_IMPORT_DEEPSPEED:
            found.append(f"line {line}: imports deepspeed")
        if root == "torch" and imported == "distributed" and module != "dist":
            found.append(f"line {line}: imports torch.distributed")
        if root != "dschat" or module == "__init__" or imported.startswith("__"):
            continue
        if imported not in PLACE:
            found.append(f"line {line}: imports {imported}, which the table does not know")
        elif not may_import(module, imported):
            found.append(f"line {line}: {module} may not import {imported}")
    for node in ast.walk(tree):
        line = f"line {getattr(node, 'lineno', 0)}"
        if module != "dist":
            if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES:
                found.append(f"{line}: reads {node.value}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                found.append(f"{line}: calls torch.distributed")
        compares = isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        if compares and "model_type" in ast.unparse(node):
            found.append(f"{line}: branches on model_type")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            found.append(f"{line}: prints")
    return found


@each_file
def test_house_rules(path):
    assert module_of(path) in {"__init__", *PLACE}, "a new module needs a row in LAYERS"
    assert offences(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("losses.py", "from dschat import dist", "may not import dist"),
        ("cli.py", "import dschat.models.load", "may not import models"),
        ("data/gold.py", "def f():\n    from dschat.models import load", "may not import models"),
        ("supervised.py", "from dschat.rlhf.ppo import X", "may not import rlhf"),
        ("rollout.py", "from dschat.log import get", "may not import log"),
        ("log.py", "from dschat.nonsense import x", "does not know"),
        ("models/load.py", "import deepspeed.zero", "imports deepspeed"),
        ("rlhf/ppo.py", "import torch\ntorch.distributed.barrier()", "calls torch.distributed"),
        ("rlhf/ppo.py", "from torch import distributed", "imports torch.distributed"),
        ("metrics.py", "import os\nos.environ['RANK']", "reads RANK"),
        ("models/load.py", "if config.model_type == 'opt': pass", "branches on model_type"),
        ("log.py", "print('x')", "prints"),
    ],
)
def test_rules_catch(module, source, fault):
    (found,) = offences(PACKAGE / module, source)
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("log.py", "from dschat import dist\nfrom dschat.config import UserError"),
        ("data/gold.py", "from dschat.data import world"),
        ("hybrid/stream.py", "import deepspeed\nfrom dschat.models.lora import merge"),
        ("inference/arch.py", "ARCHS[config.model_type]"),
        ("dist.py", "import os, torch\nos.environ['RANK']\ntorch.distributed.barrier()"),
    ],
)
def test_rules_allow(module, source):
    assert offences(PACKAGE / module, source) == []


def test_bare_import_is_light():
    """``import dschat``, its configs and its command line load neither torch nor deepspeed."""
    source = (
        "import sys, dschat, dschat.cli, dschat.dist, dschat.launch\n"
        "dschat.SFTConfig, dschat.RewardConfig, dschat.RLHFConfig\n"
        "sys.exit(' '.join({'torch', 'deepspeed', 'datasets'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_imports():
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in FILES]
    source = (
        "import importlib, dschat\n"
        f"for name in {names!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "for name in dschat.__all__: getattr(dschat, name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
