"""Rules about the source that neither ruff nor the import contracts can state."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import python

import dschat

PACKAGE = Path(__file__).resolve().parents[1] / "dschat"

# Modules that write below a folder that they have just made themselves, or under a random name.
WRITES_IN_ITS_OWN_FOLDER = {
    "checkpoint/hf_export.py",
    "inference/kernels/cpu.py",
    "distributed/memory.py",  # /proc
    "models/cpu_matmul.py",
    "models/tokenizer.py",
    "startup/files.py",
    "user_code/processes.py",  # /dev/null
}
# One answer for the whole process; a kernel asks about a device that it was given.
ASKS_FOR_GPUS = {"distributed/env.py", "inference/model/step_kernels.py"}
KNOWS_TYPES = ("inference/model/", "models/")  # folders with tables of exceptions by model type
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
# A file without any of these words breaks no rule: parsing all of them takes seconds.
WORDS = re.compile(r"triton|open\(|write_|RANK|WORLD_SIZE|model_type|cuda\.is_available")

FILES = sorted(PACKAGE.rglob("*.py"))


def imports_triton(tree: ast.AST) -> bool:
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = [n.module or "" for n in imports if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in imports if isinstance(n, ast.Import) for a in n.names]
    return any(module.split(".")[0] == "triton" for module in modules)


def writes_under_a_known_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if called == "open" and ast.unparse(node.func) != "os.open":
        constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
        modes = {"w", "wb", "a", "ab", "ab+", "x", "xb"} & {c for c in constants if c.__hash__}
        return bool(modes) and all(keyword.arg != "opener" for keyword in node.keywords)
    return called in ("write_text", "write_bytes")


def branches_on_type(node: ast.AST, name: str) -> bool:
    """Whether a module compares a model's type, other than with a table of exceptions."""
    if not isinstance(node, ast.Compare) or isinstance(node.left, ast.Constant):
        return False
    looks_up = isinstance(node.ops[0], ast.In | ast.NotIn) and name.startswith(KNOWS_TYPES)
    is_table = looks_up and isinstance(node.comparators[0], ast.Name)
    return "model_type" in ast.unparse(node) and not is_table


def offences(path: Path, source: str) -> list[str]:
    """Lines of ``source``, taken as the file ``path`` of the package, that break a rule."""
    if not WORDS.search(source):
        return []
    tree, found = ast.parse(source), []
    name = path.relative_to(PACKAGE).as_posix()
    if imports_triton(tree) and path.parent != PACKAGE / "inference" / "kernels" / "cuda":
        found.append("imports triton")
    if "cuda.is_available" in source and name not in ASKS_FOR_GPUS:
        found.append("asks torch for GPUs; use dschat.distributed.has_gpu")
    reads_launcher = path.relative_to(PACKAGE).parts[0] in ("dist.py", "distributed")
    for node in ast.walk(tree):
        line = f"line {getattr(node, 'lineno', 0)}"
        is_variable = isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES
        if is_variable and not reads_launcher:
            found.append(f"{line}: reads {node.value}")
        if writes_under_a_known_name(node) and name not in WRITES_IN_ITS_OWN_FOLDER:
            found.append(f"{line}: follows links; use dschat.startup.files")
        if "model_type" in source and branches_on_type(node, name):
            found.append(f"{line}: branches on model_type")
    return found


def test_house_rules():
    found = {str(path): offences(path, path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("report.py", "path.write_text(page)", "follows links"),
        ("report.py", "path.open('ab')", "follows links"),
        ("metrics.py", "import os\nos.environ['RANK']", "reads RANK"),
        ("models/load.py", "if config.model_type == 'opt': pass", "branches on model_type"),
        (
            "models/load.py",
            "if config.model_type in ('opt', 'llama'): pass",
            "branches on model_type",
        ),
        ("rlhf/run.py", "if config.model_type in TABLE: pass", "branches on model_type"),
        ("inference/generators/engine.py", "torch.cuda.is_available()", "asks torch for GPUs"),
        ("inference/generators/engine.py", "import triton.language as tl", "imports triton"),
        ("inference/generators/engine.py", "from triton import jit", "imports triton"),
    ],
)
def test_rules_catch(module, source, fault):
    (found,) = offences(PACKAGE / module, source)
    assert fault in found


def test_rules_allow():
    assert offences(PACKAGE / "inference/arch.py", "ARCHS[config.model_type]") == []
    assert offences(PACKAGE / "models/load.py", "config.model_type not in TABLE") == []
    assert offences(PACKAGE / "distributed/env.py", "import os\nos.environ['RANK']") == []


def test_bare_import_is_light():
    """``import dschat``, its configs and its command line load neither torch nor deepspeed."""
    source = (
        "import sys, dschat, dschat.config.parser\n"
        "import dschat.distributed.entrypoint, dschat.launch.run_plan\n"
        "dschat.SFTConfig, dschat.RewardConfig, dschat.RLHFConfig\n"
        "sys.exit(' '.join({'torch', 'deepspeed', 'datasets'} & set(sys.modules)) or 0)"
    )
    done = python("-c", source)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_imports():
    files = FILES
    if importlib.util.find_spec("triton") is None:
        files = [p for p in FILES if not imports_triton(ast.parse(p.read_text("utf-8")))]
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in files]
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))
    for name in dschat.__all__:
        getattr(dschat, name)


@pytest.mark.slow
def test_import_contracts_catch_what_they_forbid(tmp_path):
    """`make lint` runs them on the package itself."""
    shutil.copytree(PACKAGE, tmp_path / "dschat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    for module, line in {
        "losses/policy.py": "from dschat import distributed",
        "rlhf/forwards.py": "from dschat.supervised import loop",
        "models/load.py": "import deepspeed",
        "config/steps.py": "import torch",
    }.items():
        with (tmp_path / "dschat" / module).open("a") as source:
            source.write(f"\n{line}\n")
    (tmp_path / "dschat" / "helpers").mkdir()
    (tmp_path / "dschat" / "helpers" / "__init__.py").write_text("")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    for broken in (
        "Contracts: 2 kept, 3 broken",
        "dschat.losses.policy -> dschat.distributed",
        "dschat.rlhf.forwards -> dschat.supervised.loop",
        "dschat.models.load -> deepspeed",
        "dschat.config.steps -> torch",
        "helpers",  # a package without a layer
    ):
        assert broken in said


@pytest.mark.slow
def test_imports_are_silent():
    """DeepSpeed warns of a missing GPU where it is imported before its settings are made."""
    result = python("-c", "import dschat.rlhf.trainer, dschat.supervised.setup")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_picture_of_the_layers_is_that_of_the_contract():
    """Every row of docs/layers.svg has the packages of one layer, or of two that it joins."""
    root = Path(dschat.__file__).parents[1]
    svg = (root / "docs" / "layers.svg").read_text()
    shown = re.findall(r'class="b m"[^>]*>([^<]+)<', svg)
    rows, row = {}, ""
    for text in shown:
        if text.isdigit():
            row = text
        else:
            rows[text] = int(row)
    contract, _ = re.findall(
        r"\nlayers = \[(.*?)\]", (root / "pyproject.toml").read_text(), re.DOTALL
    )
    layers = [set(layer.split(" | ")) for layer in re.findall(r'"(.*?)"', contract)][1:]
    assert rows.keys() == set().union(*layers)
    order = [max(rows[name] for name in layer) for layer in layers]
    assert order == sorted(order, reverse=True)
    assert all(len({rows[name] for name in layer}) == 1 for layer in layers)
