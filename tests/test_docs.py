"""What docs/ and README show is true: commands run or parse, flags, files and names exist, and
tables say what the code does.

Commands are taken from the ``sh`` blocks and carried out in a folder of placeholders; a program
that has no line in ``PROGRAMS`` fails.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import forked
import pyarrow
import pyarrow.parquet
import pytest
from documentation import (
    COMMANDS,
    CONFIGS,
    PAGES,
    ROOT,
    blocks,
    inline,
    known_flag,
    tables,
    text_of,
)
from test_from_deepspeed_chat import DS_CHAT_FLAGS

from dschat.builtin.reasoning_gym import COLUMNS
from dschat.builtin.tiny_model import resolve_model
from dschat.chat.load import ChatConfig
from dschat.config import RLHFConfig, parser
from dschat.config.methods import ESTIMATORS, POLICY_LOSSES, PolicyLoss
from dschat.data.sources.known_datasets import _LABEL_COLUMNS, ADAPTERS, GENERIC
from dschat.launch import recipe, run_plan
from dschat.launch.cluster import read_hostfile
from dschat.offline.rows import AnswerLines, Rows

AT_ROOT = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md"]
each_page = pytest.mark.parametrize("name", [*PAGES, "README.md"])
with_links = pytest.mark.parametrize("name", [*PAGES, *AT_ROOT])


def commands() -> list[list[str]]:
    """Every line of every ``sh`` block, in words."""
    found = []
    for page in [*PAGES.values(), text_of("README.md")]:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found.append(shlex.split(line.removeprefix(".venv/bin/"), comments=True))
    return [words for words in found if words and words[0] != "make"]


# -- commands


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The placeholders of the commands: data files, models, and the tree's own examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pairs = [
        {"prompt": f"Question {i}?", "chosen": f"Good {i}.", "rejected": f"Bad {i}."}
        for i in range(12)
    ]
    Path("my_preferences.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    questions = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    Path("my_questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    verbs = [{"question": f"What of {i}?", "answer": "a", "accepted": ["a"]} for i in range(12)]
    Path("verbs.jsonl").write_text("\n".join(map(json.dumps, verbs)))
    Path("my_prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}))
    tasks = [{**row, "task": "a task", "entry": "{}"} for row in questions]
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    lines = ["prompt,chosen,rejected", *(",".join(row.values()) for row in pairs)]
    Path("more.csv").write_text("\n".join(lines))
    lines = ["question.text,best,worst", *lines[1:]]
    Path("my_table.csv").write_text("\n".join(lines))
    Path("shards").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), "shards/0.parquet")
    (settings,) = blocks(PAGES["tuning.md"], "json")
    Path("my_deepspeed.json").write_text(settings)
    for block in blocks(PAGES["evaluation.md"], "yaml"):
        Path(block.split()[1]).write_text(block)
    Path("models").mkdir()
    for name in ("my-base", "my-sft", "my-reward"):
        Path("models", name).symlink_to(resolve_model("builtin/tiny"))
    Path("output/demo/step3_rlhf").mkdir(parents=True)  # what other commands have trained
    Path("output/demo/step3_rlhf/actor").symlink_to(resolve_model("builtin/tiny"))
    for name in ("guess_game", "calculator", "search"):  # what examples/ have written
        Path("output/data", name).mkdir(parents=True)
        Path("output/data", name, "train.jsonl").write_text(json.dumps(pairs[0]))
    for name in ("training", "examples"):
        Path(name).symlink_to(ROOT / name)
    return tmp_path


def dry_run(words: list[str]) -> None:
    """Plan what ``train.py`` would run, and parse it as the steps would."""
    made = run_plan.plan(*recipe.parse_args([*words, "--dry_run"]), ROOT)
    assert made.commands
    for run, command in made.commands:
        script = [word.endswith("main.py") for word in command].index(True)
        parser.parse(run.step.config_class, command[script + 1 :])


def parse_step(words: list[str]) -> None:
    (number,) = (n for n, s in recipe.STEPS.items() if words[0] == f"{s.name}/main.py")
    assert (ROOT / words[0]).is_file()
    parser.parse(CONFIGS[number], words[1:])


def dschat(words: list[str]) -> None:
    first = {"report": "runs", "replay": "run"}.get(words[0])
    config = parser.parse(COMMANDS[words[0]], words[1:], first=first)
    if words[0] == "generate":  # new columns beside those of its data
        AnswerLines(config, Rows(config), tokenizer=None)


def python(words: list[str]) -> None:
    if words[:2] == ["-m", "dschat.data"]:
        done = forked.run(*words, cwd=os.getcwd())
        assert (done.code, "example 1" in done.stdout) == (0, True), done.stderr
    elif words[:2] == ["-m", "dschat"]:
        dschat(words[2:])
    elif words[0] == "train.py":
        dry_run(words[1:])
    elif words[0] in ("benchmarks/gpu.py", "benchmarks/learning.py"):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "benchmarks"))
            patch.setattr(sys, "argv", words)
            import_module(Path(words[0]).stem).parse()
    elif words[0] == "benchmarks/real_models.py":
        models = (ROOT / words[0]).read_text().partition("MODELS = {")[2]
        assert all(f'"{name}": ' in models for name in words[1:])
    elif words[0].startswith("examples/"):
        assert (ROOT / words[0]).is_file()  # tests/test_*example*.py run them
    elif words[0] == "chat.py":
        end = words.index("<") if "<" in words else len(words)
        parser.parse(ChatConfig, words[1:end], takes_file=False)
    else:
        parse_step(words)


def deepspeed(words: list[str]) -> None:
    import_module(
        "dschat.runtime.deepspeed_engine"
    )  # first: it tells DeepSpeed which accelerator there is
    found = import_module("deepspeed.launcher.runner").parse_args(words)
    parse_step([found.user_script, *found.user_args])


def torchrun(words: list[str]) -> None:
    from torch.distributed.run import parse_args

    found = parse_args(words)
    parse_step([found.training_script, *found.training_script_args])


def mpirun(words: list[str]) -> None:
    read_hostfile(words[words.index("--hostfile") + 1])
    parse_step(words[words.index("python") + 1 :])


def git(words: list[str]) -> None:
    assert words[0] == "clone"
    assert f'Homepage = "{words[1]}"' in (ROOT / "pyproject.toml").read_text()


def sbatch(words: list[str]) -> None:
    """The scripts themselves run in test_recipes.py."""
    assert Path(words[0]).is_file()
    (parse_step if words[1].endswith("main.py") else dry_run)(words[1:])


PROGRAMS: dict[str, Callable] = {
    "python": python,
    "dschat": dschat,
    "deepspeed": deepspeed,
    "torchrun": torchrun,
    "mpirun": mpirun,
    "sbatch": sbatch,
    "git": git,
}


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:70])
def test_a_command_does_what_it_says(words, workplace, monkeypatch):
    library = ModuleType("reasoning_gym")  # a stand-in, which makes one row
    library.__spec__ = ModuleSpec("reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    monkeypatch.setattr("dschat.data.sources.splits.version", lambda name: "0")
    row = dict.fromkeys(COLUMNS, "text")
    monkeypatch.setattr("dschat.data.sources.splits.task_rows", lambda *_: [row])
    before = set(workplace.rglob("*"))
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    PROGRAMS[words[0]](words[1:])
    assert set(workplace.rglob("*")) == before


# -- names


@each_page
def test_flags_exist(name):
    theirs = DS_CHAT_FLAGS if name == "from-deepspeed-chat.md" else set()
    named = {f for code in inline(text_of(name)) for f in re.findall(r"--([\w.-]*\w)", code)}
    assert named or name == "architecture.md"
    assert {flag for flag in named - theirs if not known_flag(flag)} == set()


@with_links
def test_links_and_paths_resolve(name):
    page, here = text_of(name), (ROOT / "docs" / name).parent if name in PAGES else ROOT
    links = [link for link in re.findall(r"\]\(([^)#]+)", page) if "://" not in link]
    assert [link for link in links if not (here / link).exists()] == []
    folders = r"(dschat|tests|training|docs|step[123]_\w+)/[\w./-]*"
    paths = [code for code in inline(page) if re.fullmatch(folders, code)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def anchors(page: str) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@with_links
def test_links_to_headings_resolve(name):
    here = (ROOT / "docs" / name).parent if name in PAGES else ROOT
    links = re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", text_of(name))
    own = (here / Path(name).name) if name in PAGES else ROOT / name
    targets = [((here / page) if page else own, anchor) for page, anchor in links]
    assert [at for at in targets if at[1] not in anchors(at[0].read_text())] == []


@each_page
def test_recipes_exist(name):
    text = text_of(name)
    found = re.findall(r"--recipe ([\w.-]*\w)", text)
    assert [r for r in found if not (ROOT / f"training/recipes/{r}.yaml").is_file()] == []


@pytest.mark.parametrize("name", ["tuning.md", "troubleshooting.md"])
def test_metrics_exist(name):
    """The metrics that a page names are those that the code writes."""
    kinds = r"(time|throughput|memory|rollout|policy|train|objective|completions|val|eval)/[\w/]+"
    named = {code for code in inline(PAGES[name]) if re.fullmatch(kinds, code)}
    code = "".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert len(named) > 10
    written = {m: f'"{m}"'.replace('/NAME"', "") for m in named}
    assert {m for m in named if written[m] not in code} == set()


OTHERS = {"DSCHAT_LAUNCHED_BY", "DSCHAT_API_KEYS"}  # of the launcher, and of `dschat serve`


def test_environment_variables_are_those_of_the_code():
    named = set(re.findall(r"^\| (DSCHAT_\w+)", PAGES["lab/gpu.md"], re.M))
    code = "".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert named == set(re.findall(r"DSCHAT_[A-Z_]+", code)) - OTHERS


def test_pages_are_wrapped_and_their_tables_whole():
    for name, page in PAGES.items():
        shortest = 20 if name == "families.md" else 60  # its table is families.csv
        assert shortest <= len(page.splitlines()) <= 200, name
        prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
        assert [line for line in prose if len(line) > 120] == [], name
        for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
            assert re.fullmatch(r"(\|---)+\|", table.splitlines()[1]), f"{name}: {table}"


# -- README


def snippets() -> list:
    """Of each Python snippet: the paragraph before it, and the code. Where that paragraph says that
    it continues, the code begins with the snippet before.
    """
    text, code, *rest = re.split(r"^```python\n(.*?)^```$", text_of("README.md"), flags=re.M | re.S)
    found = [(text.strip().rpartition("\n\n")[2], code)]
    for text, code in zip(rest[::2], rest[1::2], strict=False):
        said = text.strip().rpartition("\n\n")[2]
        found.append((said, found[-1][1] + code if "continues" in said else code))
    return [pytest.param(*one, id=" ".join(one[0].split())[:40]) for one in found]


def leave_demo(folder: Path) -> None:
    """The models that the demo leaves, but untrained."""
    source = resolve_model("builtin/tiny")
    transformers = import_module("transformers")
    for name in ("step1_sft", "step2_reward", "step3_rlhf/actor"):
        kind, options = "CausalLM", {}
        if "reward" in name:
            kind, options = "SequenceClassification", {"num_labels": 1}
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(source, **options)
        model.save_pretrained(folder / name)
        transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(("said", "code"), snippets())
def test_a_snippet_runs_as_it_stands(said, code, tmp_path):
    """In a process and a folder of its own, offline, and without a warning. The folder is empty,
    unless the page says that the snippet comes after the demo.
    """
    if "after the demo" in said.lower():
        leave_demo(tmp_path / "output/demo")
    (tmp_path / "snippet.py").write_text(code)
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    assert [line for line in lines if re.search("warning", line, re.IGNORECASE)] == []


def test_the_picture_shows_what_was_measured():
    """docs/gold.svg, against the row of its seed in lab/measured.md."""
    svg = (ROOT / "docs" / "gold.svg").read_text()
    (row,) = (
        cells
        for cells in tables(PAGES["lab/measured.md"], "PPO, labels shuffled")
        if cells[0] == "1234"
    )
    sft, ppo, average, control = (float(row[i].strip("*")) for i in (3, 4, 5, 7))
    for label, measured in (
        ("SFT alone", sft),
        ("PPO", ppo),
        ("average", average),
        ("control", control),
    ):
        assert f">{label}: {measured:.3f}<" in svg
    curve = re.search(r'class="ppo" d="M(.*?)"', svg)[1].split(" L")
    first, last = (1 - 0.8 * (float(curve[i].split()[1]) - 62) / 200 for i in (0, -1))
    assert (first, last) == pytest.approx((sft, ppo), abs=0.002)
    seeds = [
        row[1:] for row in tables(PAGES["real-models.md"], "15", "20") if row[0].startswith("seed")
    ]
    real = re.findall(r'class="ppo real" d="M(.*?)"', svg)
    assert len(seeds) == len(real) == 3
    for row, path in zip(seeds, real, strict=True):
        drawn = [0.8 * (1 - (float(point.split()[1]) - 62) / 200) for point in path.split(" L")]
        assert drawn == pytest.approx([float(cell.strip("*")) for cell in row], abs=0.002)


# -- grpo-on-your-data.md


def test_its_reward_function_and_its_call_work(tmp_path, monkeypatch):
    """On the rows that it shows; the settings of the call are those of its command."""
    page = PAGES["grpo-on-your-data.md"]
    _, reward, call = blocks(page, "python")
    (tmp_path / "my_reward.py").write_text(reward)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [json.loads(line) for block in blocks(page, "json") for line in block.splitlines()]
    accepted_form = import_module("my_reward").accepted_form
    accepted = [row["accepted"] for row in rows]
    assert accepted_form(["golfed ", "lighted"], accepted) == [1, 1]
    assert accepted_form(["golf", ""], accepted) == [0, 0]
    made = {}
    exec(call.replace("GRPOTrainer(\n", "trainer = GRPOTrainer(\n").replace(").train()", ")"), made)
    command = next(words for words in commands() if "my_reward.py:accepted_form" in words)
    wanted = parser.parse(RLHFConfig, command[2:])
    assert asdict(made["trainer"].config) | {"reward_fn": wanted.reward_fn} == asdict(wanted)


# -- data.md


def has_pairs(adapter) -> bool:
    return bool(adapter.rejected or adapter.answers)


def test_the_known_data_sets_are_listed():
    listed = {}
    for names, steps, _ in tables(PAGES["data.md"], "name", "steps", "prompt; answers"):
        listed |= {name: steps for name in re.findall(r"`([^`]+)`", names)}
    assert set(listed) == set(ADAPTERS)
    for name, steps in listed.items():
        assert steps == ("1 2 3" if has_pairs(ADAPTERS[name]) else "1 3"), name


def test_the_columns_are_those_of_the_table():
    known = {name for a in GENERIC for column in a.columns for name in (column, *column.split("."))}
    known |= {*_LABEL_COLUMNS}
    for columns, _ in tables(PAGES["data.md"], "rows have", "they are"):
        assert set(re.findall(r"`([^`]+)`", columns)) <= known


def test_estimators_and_losses_are_the_rows_of_their_tables():
    """The tables are written from the rows: each cell is what its row says."""
    shown = {
        f"`{name}`": (
            row.formula,
            "yes" if row.has_critic else "no",
            f"loss, {row.kl_of_loss}" if row.kl_in_loss else "reward, k1",
            row.source,
        )
        for name, row in ESTIMATORS.items()
    }
    rows = tables(PAGES["algorithms.md"], "A of an action", "critic", "KL by default in", "source")
    assert {name: tuple(cells) for name, *cells in rows} == shown
    losses = POLICY_LOSSES.items()
    shown = {f"`{name}`": (row.summary, _clipped(row), row.source) for name, row in losses}
    rows = tables(PAGES["algorithms.md"], "what it does", "clip range", "source")
    assert {name: tuple(cells) for name, *cells in rows} == shown


def _clipped(row: PolicyLoss) -> str:
    sides = dict.fromkeys(row.cliprange) if row.has_range else ()
    return " ".join(f"{side:g}" for side in sides)
