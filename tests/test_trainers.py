"""Trainers in the manner of TRL: the results of the commands, to the bit."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
from data_files import put
from datasets import Dataset
from forked import ROOT
from quick import some
from safetensors.numpy import load_file
from transformers import TrainingArguments

from dschat import (
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardConfig,
    RLHFConfig,
    SFTConfig,
    SFTTrainer,
    UserError,
)
from dschat.builtin.tiny_model import resolve_model

REWARD = '''
class Log:
    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_: print(name, file=open("events", "a"))

    def __dir__(self):
        return ["on_rollout", "on_step", "on_evaluate", "on_save", "on_end"]


def starts_low(answers):
    """Answers that begin with a small letter."""
    return [float(answer[:1].islower()) for answer in answers]


async def asks_twice(client, prompt, answer):
    """An agent."""
    for text in ("Hello", answer):
        asked = [{"role": "user", "content": text}]
        made = await client.chat.completions.create(model="actor", messages=asked)
    return float(made.choices[0].message.content[:1].islower())
'''
QUESTIONS = [{"prompt": f"what is {i} plus {i + 1}?", "answer": str(2 * i + 1)} for i in range(24)]
PAIRS = [
    {"prompt": f"say {i}", "chosen": f"here is {i}", "rejected": f"no {i} today"} for i in range(24)
]
SHORT = {
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 8,
    "max_prompt_seq_len": 32,
    "max_answer_seq_len": 8,
    "num_samples_per_prompt": 2,
    "actor_learning_rate": 1e-3,
    "max_steps": 2,
    "sample_steps": 0,
}
# Trainer, its arguments in Python, the command, the folder of the result.
RUNS = {
    "GRPOTrainer": (
        "data='q.jsonl', reward_fns=[starts_low], callbacks=[r.Log()]",
        "step3_rlhf/main.py --actor_model_name_or_path builtin/tiny --advantage_estimator grpo "
        "--data_path q.jsonl --reward_fn r.py:starts_low",
        SHORT,
        "actor",
    ),
    "GRPOTrainer agent": (
        "data='q.jsonl', agent=r.asks_twice, callbacks=[r.Log()]",
        "step3_rlhf/main.py --actor_model_name_or_path builtin/tiny --advantage_estimator grpo "
        "--data_path q.jsonl --agent r.py:asks_twice",
        SHORT,
        "actor",
    ),
    "SFTTrainer": (
        "data='q.jsonl', callbacks=[r.Log]",
        "step1_sft/main.py --model_name_or_path builtin/tiny --data_path q.jsonl",
        {"max_steps": 2, "max_seq_len": 64, "per_device_train_batch_size": 2},
        "",
    ),
    "DPOTrainer": (
        "data=['p.jsonl'], callbacks=[r.Log]",
        "step2_reward/main.py --model_name_or_path builtin/tiny --loss dpo --data_path p.jsonl",
        {"max_steps": 2, "max_seq_len": 64, "per_device_train_batch_size": 2},
        "actor",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_as_the_command(name, tmp_path):
    arguments, command, settings, folder = RUNS[name]
    name = name.split()[0]
    (tmp_path / "r.py").write_text(REWARD)
    for file, rows in (("q.jsonl", QUESTIONS), ("p.jsonl", PAIRS)):
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = (
        f"from dschat import {name}\nimport r\nfrom r import starts_low\n"
        f"trainer = {name}(model='builtin/tiny', {arguments}, output_dir='api', **{settings})\n"
        "trainer.train()\n"
    )
    (tmp_path / "run.py").write_text(script)
    flags = [word for k, v in settings.items() for word in (f"--{k}", str(v))]
    step, *words = command.split()
    runs = [["run.py"], [str(ROOT / step), *words, *flags, "--output_dir", "command"]]
    for run in runs:
        done = subprocess.run(
            [sys.executable, *run], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    api, by_command = (
        load_file(tmp_path / out / folder / "model.safetensors") for out in ("api", "command")
    )
    assert api.keys() == by_command.keys()
    assert all(np.array_equal(api[key], by_command[key]) for key in api)
    iteration = ["on_rollout", "on_step"] if name == "GRPOTrainer" else ["on_step"]
    events = ["on_evaluate", *iteration, *iteration, "on_save", "on_evaluate", "on_end"]
    assert (tmp_path / "events").read_text().split() == events


def test_what_args_name_is_a_setting_and_their_defaults_are_none():
    def estimator(args):
        config = GRPOTrainer("m", reward_fns=[len], args=args).config
        return config.advantage_estimator, config.num_samples_per_prompt, config.seed

    named = RLHFConfig(advantage_estimator="gae", num_samples_per_prompt=1)
    assert estimator(RLHFConfig(seed=5)) == ("grpo", 8, 5)
    assert estimator(replace(RLHFConfig(), seed=5)) == ("grpo", 8, 5)
    assert estimator(RLHFConfig(advantage_estimator="rloo", num_samples_per_prompt=4)) == (
        *("rloo", 4),
        1234,
    )
    for args in (named, copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
        assert estimator(args) == ("gae", 1, 1234)
    assert estimator({"advantage_estimator": "gae"}) == ("gae", 8, 1234)
    assert estimator(SimpleNamespace(advantage_estimator="gae", x=1)) == ("gae", 8, 1234)
    for args in (replace(named, seed=5), replace(replace(named, kl_coef=0.2), seed=5)):
        assert estimator(copy.deepcopy(args)) == ("gae", 1, 5)
    assert estimator(replace(RLHFConfig(seed=5), advantage_estimator="gae")) == ("gae", 8, 5)
    assert estimator(RLHFConfig(**asdict(named))) == ("grpo", 8, 1234)  # every field, none named
    assert replace(named) == named
    with pytest.raises(UserError, match="^RLHFConfig: unknown setting sed"):
        replace(named, sed=5)
    with pytest.raises(UserError, match="^advantage_estimator grpo compares .* raise num_samples"):
        estimator(RLHFConfig(num_samples_per_prompt=1))


@dataclass
class OfTRL(TrainingArguments):
    """As TRL's GRPOConfig fills in its fields. A test below has TRL itself."""

    learning_rate: float = 1e-6
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None

    def __post_init__(self):
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            raise ValueError("does not divide")


OfTRL.__module__ = "trl.trainer.grpo_config"


@dataclass
class Mine(OfTRL):
    seed: int = 7
    max_prompt_seq_len: int = 99


# What a config of transformers or TRL is made with, ours that it means, and what is warned of.
THEIRS = [
    (SFTTrainer, TrainingArguments, {}, {}, ""),
    (DPOTrainer, TrainingArguments, {"save_total_limit": None, "seed": 42}, {}, ""),
    (
        *(SFTTrainer, TrainingArguments),
        {"output_dir": "o", "learning_rate": 1e-4, "num_train_epochs": 2.0},
        {"output_dir": "o", "learning_rate": 1e-4, "num_train_epochs": 2},
        "",
    ),
    (
        *(DPOTrainer, TrainingArguments),
        {"lr_scheduler_type": "constant", "report_to": ["wandb"], "gradient_checkpointing": True},
        {"lr_scheduler_type": "constant", "report_to": ["wandb"], "gradient_checkpointing": True},
        "",
    ),
    (SFTTrainer, TrainingArguments, {"warmup_steps": 3}, {}, "setting warmup_steps; use num_w"),
    (SFTTrainer, TrainingArguments, {"eval_strategy": "steps"}, {"eval_steps": 500}, ""),
    (SFTTrainer, TrainingArguments, {"eval_strategy": "epoch"}, {}, "setting eval_strategy; use"),
    (SFTTrainer, TrainingArguments, {"metric_for_best_model": "x"}, {}, "setting metric_for_"),
    (SFTTrainer, TrainingArguments, {"hub_model_id": "me/x"}, {}, "setting hub_model_id; use"),
    (
        *(DPOTrainer, TrainingArguments),
        {"push_to_hub": True, "hub_model_id": "me/x", "output_dir": "steps"},
        {"push_to_hub": "me/x", "output_dir": "steps"},
        "",
    ),
    (GRPOTrainer, TrainingArguments, {"bf16": False, "use_cpu": True}, {}, ""),
    (GRPOTrainer, OfTRL, {"use_cpu": True}, {}, ""),
    (GRPOTrainer, OfTRL, {"bf16": False}, {}, "setting bf16; use dtype"),
    (
        *(GRPOTrainer, OfTRL),
        {"bf16": False, "gradient_accumulation_steps": 2, "max_steps": 9},
        {"gradient_accumulation_steps": 2, "max_steps": 9},
        "setting bf16; use dtype",
    ),
    (
        *(GRPOTrainer, OfTRL),
        {"use_cpu": True, "steps_per_generation": 4, "num_generations": 16},
        {},
        "settings: num_generations (use num_samples_per_prompt), steps_per_generation (use",
    ),
    (GRPOTrainer, OfTRL, {"use_cpu": True, "steps_per_generation": 4}, {}, "setting steps_per_"),
    (GRPOTrainer, Mine, {"use_cpu": True}, {"seed": 7, "max_prompt_seq_len": 99}, ""),
]


@pytest.mark.parametrize(("trainer", "kind", "given", "expected", "said"), THEIRS)
def test_configs_of_transformers_and_trl(trainer, kind, given, expected, said, caplog):
    """What was set in them counts; neither their defaults nor what they derive."""
    more = {"reward_fns": len} if trainer is GRPOTrainer else {}
    config = trainer("m", "d", args=kind(**given), **more).config
    assert asdict(config) == asdict(trainer("m", "d", **expected, **more).config)
    assert all(type(getattr(config, name)) is type(v) for name, v in expected.items())
    ours = [r.getMessage() for r in caplog.records if r.name == "dschat"]  # not transformers'
    assert said in caplog.text
    assert bool(said) == bool(ours)


def test_every_default_of_trl_is_none_of_ours(caplog):
    trl = pytest.importorskip("trl")
    for trainer, name in ((SFTTrainer, "SFT"), (DPOTrainer, "DPO"), (GRPOTrainer, "GRPO")):
        more = {"reward_fns": len} if trainer is GRPOTrainer else {}
        theirs = getattr(trl, f"{name}Config")
        for given in ({"use_cpu": True}, {"use_cpu": True, "gradient_accumulation_steps": 4}):
            ours = {name: value for name, value in given.items() if name != "use_cpu"}
            config = trainer("m", "d", args=theirs(**given), **more).config
            assert asdict(config) == asdict(trainer("m", "d", **ours, **more).config)
    assert not [record for record in caplog.records if record.name == "dschat"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"save_steps": 0.1}, "save_steps 0.1 is not a whole number; give the number, not a share"),
        ({"logging_steps": 0.5}, "logging_steps 0.5 .* give the number, not a share"),
        ({"num_train_epochs": 2.5}, "num_train_epochs 2.5 is not a whole number; max_steps ends"),
        ({"push_to_hub": True}, "push_to_hub True is not text; give .* name, OWNER/NAME"),
        ({"report_to": ["neptune"]}, "report_to .* not one of tensorboard, wandb, trackio, ml"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type .* is not one of cosine, linear"),
    ],
)
def test_values_that_are_wider_there(given, says):
    with pytest.raises(UserError, match=f"^{says}"):
        SFTTrainer("m", "d", args=TrainingArguments(**given))


def test_names_of_trl(own_cache):
    one, two = GRPOTrainer("m", "d", reward_fns=len), GRPOTrainer("m", "d", reward_fns=[len])
    trl = GRPOTrainer("m", train_dataset="d", eval_dataset=["e"], reward_funcs=len)
    assert asdict(one.config) == asdict(two.config)
    assert asdict(trl.config) == asdict(one.config) | {"eval_data_path": ["e"]}
    (path,) = SFTTrainer("m", train_dataset=QUESTIONS).config.data_path
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == QUESTIONS


def test_all_rows_of_python_code_are_for_the_step(own_cache):
    """Those of a file are shared out among three, as its command does."""

    def share(trainer, data, **settings):
        return trainer("m", data, **settings).config.data_split

    assert share(SFTTrainer, QUESTIONS) == "1,0,0"
    assert share(DPOTrainer, ["d", Dataset.from_list(QUESTIONS)]) == "0,1,0"
    assert share(GRPOTrainer, QUESTIONS, reward_fns=len) == "0,0,1"
    assert share(DPOTrainer, QUESTIONS, args=RewardConfig(data_split="1,1,1")) == "1,1,1"
    assert share(DPOTrainer, QUESTIONS, data_split="auto") == "auto"
    assert share(DPOTrainer, ["d", Path("e")]) == "auto"


# The quick starts of TRL 1.16's README, with another import line, a folder for the model, and one
# for the data set.
CHAT = [[{"role": "user", "content": f"what is {i} plus {i}?"}] for i in range(10)]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("it is that", "no"))
QUICK_STARTS = {
    "SFTTrainer": ("Capybara", [{"messages": chat + YES, "source": "x"} for chat in CHAT], ""),
    "DPOTrainer": ("pairs", [{"chosen": chat + YES, "rejected": chat + NO} for chat in CHAT], ""),
    "RewardTrainer": ("pairs", [{"prompt": c, "chosen": YES, "rejected": NO} for c in CHAT], ""),
    "GRPOTrainer": (
        *("DeepMath-103K", [{"prompt": chat, "solution": "2"} for chat in CHAT]),
        "    reward_funcs=accuracy_reward,\n",
    ),
}


@pytest.mark.parametrize("trainer", some(QUICK_STARTS, ["SFTTrainer"]))
def test_trls_quick_starts(trainer, tmp_path):
    name, rows, reward = QUICK_STARTS[trainer]
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen3-0.6B").symlink_to(resolve_model("builtin/tiny"))
    put(tmp_path / "trl-lib" / name / "train.jsonl", rows)
    (tmp_path / "rewards.py").write_text(
        "def accuracy_reward(completions, solution, **kwargs):\n"
        "    texts = [turns[-1]['content'] for turns in completions]\n"
        "    return [float(right in text) for text, right in zip(texts, solution)]\n"
    )
    script = tmp_path / "quick_start.py"
    script.write_text(
        "from datasets import load_dataset\n"
        f"from dschat import {trainer}\n"
        "from rewards import accuracy_reward\n\n"
        f'dataset = load_dataset("trl-lib/{name}", split="train")\n\n'
        f'trainer = {trainer}(\n    model="Qwen/Qwen3-0.6B",\n{reward}'
        "    train_dataset=dataset,\n)\n"
        "trainer.train()\n"
    )
    done = forked.run(str(script), cwd=str(tmp_path), limit_s=200)
    assert done.code == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("output/*/COMPLETE"))) == 1


def test_settings():
    trainer = GRPOTrainer("m", "d", reward_fns=[len], num_samples_per_prompt=4, kl_coef=0.1)
    config = trainer.config
    assert (config.actor_model_name_or_path, config.data_path) == ("m", ["d"])
    assert (config.advantage_estimator, config.num_samples_per_prompt) == ("grpo", 4)
    assert config.critic_model_name_or_path == "m"  # of which grpo trains none
    ppo = PPOTrainer("m", reward_model="r").config
    assert (ppo.advantage_estimator, ppo.critic_model_name_or_path) == ("gae", "r")
    assert ppo.reward_model_name_or_path == "r"
    # Beside functions the reward model scores too, with and without a critic.
    for trainer in (PPOTrainer, GRPOTrainer):
        both = trainer("m", "d", reward_model="r", reward_fns=[len]).config
        assert (both.reward_model_name_or_path, both.critic_model_name_or_path) == ("r", "r")
    assert DPOTrainer("m", "d").config.loss == "dpo"
    args = SFTConfig(learning_rate=1e-5, data_path=["e"])
    sft = SFTTrainer("m", args=args, seed=7).config
    assert (sft.learning_rate, sft.data_path, sft.seed) == (1e-5, ["e"], 7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SFTTrainer("m", "d", learning_rat=1), "learning_rat; did you mean learning_rate"),
        (lambda: SFTTrainer("m", "d", max_seq_len="8"), "max_seq_len '8' is not a whole number"),
        (lambda: GRPOTrainer("m", "d"), "nothing scores; name reward_model or reward_fns"),
        (lambda: PPOTrainer("m", "d", reward_fns=[len], kl_coef=-1), "^kl_coef -1"),
        (lambda: PPOTrainer("m", "d", reward_model=len), "reward_model is a builtin_function"),
        (
            lambda: GRPOTrainer("m", "d", agent=len, partial_rollout=True),
            "^partial_rollout excludes environment, tools and agent",
        ),
        (
            lambda: GRPOTrainer("m", "d", tools=[len], reward_fns=[len], rollout_backend="vllm"),
            "^rollout_backend vllm excludes",
        ),
        (lambda: SFTTrainer("m", {"prompt": ["a"]}), "^data of type dict"),
        (lambda: SFTTrainer("m", eval_dataset=len), "^eval_dataset of type builtin_function"),
        (lambda: SFTTrainer("m", "d", train_dataset="d"), "data and train_dataset mean the same"),
        (lambda: SFTTrainer(QUESTIONS, "d"), "model is a list; give a folder"),
        (lambda: SFTTrainer("m", "d", tokenizer=len), "processing_class is for a loaded model"),
    ],
)
def test_mistakes(make, words):
    with pytest.raises(UserError, match=words):
        make()
