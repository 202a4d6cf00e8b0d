"""What docs/ shows is true: its commands run or parse, its flags, files and names exist, and its
tables say what the code does.

Commands are taken from the ``sh`` blocks and carried out in a folder of placeholders; a program
that has no line in ``PROGRAMS`` fails.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from dschat.builtin.tiny_model import resolve_model
from dschat.chat.load import ChatConfig
from dschat.config import RLHFConfig, UserError, parser
from dschat.config.data import ShowConfig
from dschat.config.report import ReportConfig
from dschat.data import __main__
from dschat.data.sources.known_datasets import ADAPTERS, GENERIC
from dschat.launch import recipe, run_plan
from dschat.launch.cluster import read_hostfile
from dschat.offline.flags import EvalConfig, GenerateConfig
from dschat.serving.flags import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
each_page = pytest.mark.parametrize("name", [*PAGES, "README.md"])
COMMANDS = {
    "serve": ServeConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
    "report": ReportConfig,
}
CONFIGS = {n: step.config_class for n, step in recipe.STEPS.items()}
FLAGS = {n: parser.flag_names(config) for n, config in CONFIGS.items()}
TRAIN_FLAGS = set().union(parser.flag_names(recipe.TrainConfig), *FLAGS.values())
BENCHMARKS = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
OTHER_FLAGS = {"gpus_per_node", "gpus_per_task", *re.findall(r'"--(\w+)"', BENCHMARKS)}  # SLURM's

# Every flag of DeepSpeed-Chat's three main.py, older names included, with a value as its own
# training scripts have it.
ALL_STEPS = (
    "--data_path Dahoas/rm-static --data_split 2,4,4 --data_output_path /tmp/data_files/ "
    "--num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 1 "
    "--num_warmup_steps 100 --output_dir ./output --seed 1234 --local_rank -1 --offload "
    "--dtype bf16 --only_optimize_lora --compute_fp32_loss --enable_tensorboard "
    "--tensorboard_path ./output --add_eot_token --deepspeed --deepspeed_config ds.json "
    "--deepscale --deepscale_config ds.json "
)
ONE_MODEL = (
    "--model_name_or_path facebook/opt-350m --per_device_train_batch_size 8 "
    "--per_device_eval_batch_size 8 --max_seq_len 512 --learning_rate 5e-5 --weight_decay 0.1 "
    "--gradient_checkpointing --dropout 0.0 --zero_stage 3 --lora_dim 128 "
    "--lora_module_name decoder.layers. --lora_learning_rate 5e-4 --disable_dropout "
)
THEIRS = {
    1: ALL_STEPS + ONE_MODEL + "--sft_only_data_path pvduy/sharegpt --eot_token <|endoftext|> "
    "--print_loss",
    2: ALL_STEPS + ONE_MODEL + "--num_padding_at_beginning 1 --eval_interval 50 --eval_iters 100 "
    "--no_bf16_to_fp32_loss --no_fused_kernels",
    3: ALL_STEPS + "--unsupervised_dataset_name wikitext --unsupervised_dataset_config_name "
    "wikitext-103-v1 --unsup_coef 27.8 --actor_model_name_or_path a --critic_model_name_or_path c "
    "--num_padding_at_beginning 1 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --generation_batches 1 --ppo_epochs 1 "
    "--max_prompt_seq_len 256 --max_answer_seq_len 256 --actor_learning_rate 9.65e-6 "
    "--critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 "
    "--preprocessing_num_workers 2 --enable_hybrid_engine --unpin_actor_parameters "
    "--release_inference_cache --inference_tp_size 2 --tp_gather_partition_size 4 "
    "--offload_reference_model --actor_zero_stage 3 --critic_zero_stage 3 "
    "--actor_gradient_checkpointing --critic_gradient_checkpointing --actor_dropout 0.0 "
    "--critic_dropout 0.0 --actor_lora_dim 128 --actor_lora_module_name decoder.layers. "
    "--critic_lora_dim 128 --critic_lora_module_name decoder.layers. --enable_ema "
    "--actor_lora_learning_rate 5e-4 --critic_lora_learning_rate 5e-4 "
    "--enable_mixed_precision_lora --align_overflow --print_answers --print_answers_interval 1 "
    "--enable_test_mode --test_stop_step 10 --per_device_train_batch_size 4 "
    "--per_device_mini_train_batch_size 4 --generation_batch_numbers 1 --disable_actor_dropout "
    "--disable_critic_dropout",
    "dpo": "--beta 0.1 --label_smoothing 0.0 --offload_reference_model",
    "train.py": "--step 1 --actor-model 1.3b --reward-model 350m --actor-zero-stage 2 "
    "--reward-zero-stage 2 --output-dir ./output --num-gpus 8 --deployment-type single_node",
}
DS_CHAT_FLAGS = {name for text in THEIRS.values() for name in re.findall(r"--([\w-]+)", text)}


def text_of(name: str) -> str:
    return PAGES.get(name) or (ROOT / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every line of every ``sh`` block, in words."""
    found = []
    for page in PAGES.values():
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found.append(shlex.split(line, comments=True))
    return [words for words in found if words]


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


# -- commands


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The placeholders of the commands: data files, models, and the tree's own examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("dschat.observability.console.setup", lambda *_: None)
    pairs = [
        {"prompt": f"Question {i}?", "chosen": f"Good {i}.", "rejected": f"Bad {i}."}
        for i in range(12)
    ]
    Path("my_preferences.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    questions = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    Path("my_questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    lines = ["prompt,chosen,rejected", *(",".join(row.values()) for row in pairs)]
    Path("more.csv").write_text("\n".join(lines))
    lines = ["question.text,best,worst", *lines[1:]]
    Path("my_table.csv").write_text("\n".join(lines))
    Path("shards").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), "shards/0.parquet")
    (settings,) = blocks(PAGES["tuning.md"], "json")
    Path("my_deepspeed.json").write_text(settings)
    Path("models").mkdir()
    for name in ("my-base", "my-sft", "my-reward"):
        Path("models", name).symlink_to(resolve_model("builtin/tiny"))
    Path("output/demo/step3_rlhf").mkdir(parents=True)  # what other commands have trained
    Path("output/demo/step3_rlhf/actor").symlink_to(resolve_model("builtin/tiny"))
    Path("training").symlink_to(ROOT / "training")
    return tmp_path


def dry_run(words: list[str]) -> None:
    """Plan what ``train.py`` would run, and parse it as the steps would."""
    made = run_plan.plan(*recipe.parse_args([*words, "--dry_run"]), ROOT)
    assert made.commands
    for step, command in made.commands:
        script = [word.endswith("main.py") for word in command].index(True)
        parser.parse(step.config_class, command[script + 1 :])


def parse_step(words: list[str]) -> None:
    (number,) = (n for n, s in recipe.STEPS.items() if words[0] == f"{s.name}/main.py")
    assert (ROOT / words[0]).is_file()
    parser.parse(CONFIGS[number], words[1:])


def dschat(words: list[str], capsys: pytest.CaptureFixture) -> None:
    flags = ["--runs", *words[1:]] if words[0] == "report" else words[1:]
    parser.parse(COMMANDS[words[0]], flags)


def python(words: list[str], capsys: pytest.CaptureFixture) -> None:
    if words[:2] == ["-m", "dschat.data"]:
        __main__.main()
        assert "example 1" in capsys.readouterr().out
    elif words[:2] == ["-m", "dschat"]:
        dschat(words[2:], capsys)
    elif words[0] == "train.py":
        dry_run(words[1:])
    elif words[0] == "benchmarks/gpu.py":
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "benchmarks"))
            patch.setattr(sys, "argv", words)
            import_module("gpu").parse()
    elif words[0] == "chat.py":
        end = words.index("<") if "<" in words else len(words)
        parser.parse(ChatConfig, words[1:end], takes_file=False)
    else:
        parse_step(words)


def deepspeed(words: list[str], capsys: pytest.CaptureFixture) -> None:
    import_module(
        "dschat.runtime.deepspeed_engine"
    )  # first: it tells DeepSpeed which accelerator there is
    found = import_module("deepspeed.launcher.runner").parse_args(words)
    parse_step([found.user_script, *found.user_args])


def torchrun(words: list[str], capsys: pytest.CaptureFixture) -> None:
    from torch.distributed.run import parse_args

    found = parse_args(words)
    parse_step([found.training_script, *found.training_script_args])


def mpirun(words: list[str], capsys: pytest.CaptureFixture) -> None:
    read_hostfile(words[words.index("--hostfile") + 1])
    parse_step(words[words.index("python") + 1 :])


def sbatch(words: list[str], capsys: pytest.CaptureFixture) -> None:
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
}


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:70])
def test_a_command_does_what_it_says(words, workplace, capsys, monkeypatch):
    before = {path for path in workplace.rglob("*") if "cache" not in path.parts}
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    monkeypatch.setattr(sys, "argv", words[2:])  # what `python -m dschat.data` sees
    PROGRAMS[words[0]](words[1:], capsys)
    assert {path for path in workplace.rglob("*") if "cache" not in path.parts} == before


# -- names


def known_flag(name: str) -> bool:
    prefix, _, name = name.replace("-", "_").rpartition(".")
    if prefix:
        return name in FLAGS[int(prefix.removeprefix("step"))]
    configs = (ShowConfig, ChatConfig, *COMMANDS.values())
    others = (*map(parser.flag_names, configs), {"help", "config"})
    return name in TRAIN_FLAGS.union(*others, OTHER_FLAGS)


@each_page
def test_flags_exist(name):
    theirs = DS_CHAT_FLAGS if name == "from-deepspeed-chat.md" else set()
    named = {f for code in inline(text_of(name)) for f in re.findall(r"--([\w.-]*\w)", code)}
    assert named or name == "architecture.md"
    assert {flag for flag in named - theirs if not known_flag(flag)} == set()


@each_page
def test_links_and_paths_resolve(name):
    page, here = text_of(name), ROOT / "docs" if name in PAGES else ROOT
    links = [link for link in re.findall(r"\]\(([^)#]+)", page) if "://" not in link]
    assert [link for link in links if not (here / link).exists()] == []
    folders = r"(dschat|tests|training|docs|step[123]_\w+)/[\w./-]*"
    paths = [code for code in inline(page) if re.fullmatch(folders, code)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@each_page
def test_recipes_exist(name):
    text = text_of(name)
    found = re.findall(r"--recipe ([\w.-]*\w)", text)
    assert [r for r in found if not (ROOT / f"training/recipes/{r}.yaml").is_file()] == []


def test_metrics_exist():
    """The names in tuning.md are those that the code writes."""
    named = {
        code
        for code in inline(PAGES["tuning.md"])
        if re.fullmatch(r"(time|throughput|memory|rollout|policy|train)/\w+", code)
    }
    code = "".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert len(named) > 10
    assert {metric for metric in named if f'"{metric}"' not in code} == set()


def test_pages_are_wrapped_and_their_tables_whole():
    for name, page in PAGES.items():
        assert 60 <= len(page.splitlines()) <= 200, name
        prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
        assert [line for line in prose if len(line) > 120] == [], name
        for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
            assert re.fullmatch(r"(\|---)+\|", table.splitlines()[1]), f"{name}: {table}"


# -- from-deepspeed-chat.md


def verdicts() -> dict[tuple[object, str], tuple[str, str]]:
    """(step, DeepSpeed-Chat's flag) -> (same, as, use or no; our name)."""
    found = {}
    for cells in tables(PAGES["from-deepspeed-chat.md"], "step", "here"):
        match = re.match(r"(same|as|use|no)(?: `--([\w.-]+)`)?(?::|$)", cells[2])
        assert match, cells
        for step in cells[1].split():
            for flag in re.findall(r"`--([\w-]+)`", cells[0]):
                key = (int(step) if step.isdecimal() else step, flag)
                assert key not in found, key
                found[key] = (match[1], match[2] or flag)
    return found


VERDICTS = verdicts()


def test_every_flag_of_deepspeed_chat_is_there():
    theirs = {
        (step, name) for step, text in THEIRS.items() for name in re.findall(r"--([\w-]+)", text)
    }
    assert theirs - set(VERDICTS) == set()
    assert set(VERDICTS) - theirs == set()  # and none that it never had


@pytest.mark.parametrize("step", THEIRS)
def test_a_flag_is_what_the_table_says(step):
    names = FLAGS.get(step, TRAIN_FLAGS)
    config = CONFIGS.get(step, recipe.TrainConfig)
    own = {f.name for f in fields(config)} if step in CONFIGS else names
    for (where, flag), (verdict, ours) in VERDICTS.items():
        if where != step:
            continue
        flag, ours = flag.replace("-", "_"), ours.replace("-", "_")
        said = f"step {step}: {flag}: {verdict} {ours}"
        assert (flag in names) == (verdict in ("same", "as")), said
        assert verdict != "same" or (flag == ours and flag in own), said
        assert verdict != "as" or (flag not in own and ours in own), said
        assert verdict != "use" or (known_flag(ours) and (ours in names or "." in ours)), said


@pytest.mark.parametrize("step", CONFIGS)
def test_what_is_accepted_parses_as_their_scripts_write_it(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    groups = [group.split() for group in re.split(r" (?=--)", THEIRS[step])]
    kept = [g for g in groups if VERDICTS[step, g[0][2:]][0] in ("same", "as")]
    argv = [word for group in kept for word in group]
    given = parser.given(CONFIGS[step], argv)
    assert set(given) == {VERDICTS[step, group[0][2:]][1] for group in kept}
    parser.parse(CONFIGS[step], argv)
    for group in groups:
        if group not in kept:
            with pytest.raises(UserError, match=f"unknown flag {group[0]}"):
                parser.parse(CONFIGS[step], [*argv, *group])


def test_their_dpo_script_is_a_loss_of_step_2():
    """It has step 2's flags, save the one of reward models, and its own."""
    steps = re.sub(r"--num_padding_at_beginning \S+", "", THEIRS[2])
    groups = [g.split() for g in re.split(r" (?=--)", f"{steps} {THEIRS['dpo']}")]
    kept = [g for g in groups if VERDICTS.get((2, g[0][2:]), ["same"])[0] in ("same", "as")]
    argv = [word for group in kept for word in group if "deepspeed" not in group[0]]
    config = parser.parse(CONFIGS[2], ["--loss", "dpo", *argv])
    assert (config.used_beta, config.offload_reference_model) == (0.1, True)


def test_defaults_that_differ():
    rows = tables(PAGES["from-deepspeed-chat.md"], "step", "there", "here")
    assert len(rows) > 5
    for flag, steps, _, ours in rows:
        for step in map(int, steps.split()):
            name = flag.strip("`-")
            value = getattr(CONFIGS[step](), name)
            shown = " ".join(value) if isinstance(value, list) else str(value)
            assert shown == ours, (step, name)
    paragraph = re.search(r"PPO's constants.*?\n\n", PAGES["from-deepspeed-chat.md"], re.DOTALL)
    constants = re.findall(r"`--(\w+)`\s+([\d.]+\d|\d)", paragraph[0])
    assert len(constants) == 6
    config = RLHFConfig()
    used = {"clip_reward": config.clip_where(True), "cliprange": config.cliprange_sides[0]}
    for name, value in constants:
        assert used.get(name, getattr(config, name)) == float(value), name


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
    for columns, _ in tables(PAGES["data.md"], "rows have", "they are"):
        assert set(re.findall(r"`([^`]+)`", columns)) <= known
