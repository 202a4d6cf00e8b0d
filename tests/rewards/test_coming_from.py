"""docs/coming-from.md, "What you bring": each row of its table, tried."""

import json
import os

import forked
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from documentation import PAGES, tables
from others_rewards import scores_of
from pandas import DataFrame
from quick import some
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat import GRPOTrainer, SFTTrainer
from dschat.builtin.tiny_model import resolve_model
from dschat.config import UserError

TABLE = dict(tables(PAGES["coming-from.md"], "you bring", "what happens"))
QUESTION = "What is {}?"


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def rows(make) -> list[dict]:
    """Twelve rows of question, right answer and wrong answer."""
    texts = [(QUESTION.format(i), f"It is {i}.", "No idea.") for i in range(12)]
    return [make(*map(turn, ("user", "assistant", "assistant"), row)) for row in texts]


@pytest.fixture
def read(tmp_path):
    """``read(rows, flag, ...)``: what ``python -m dschat.data`` says of them."""

    def report(found: list[dict], *flags: str, parquet: bool = False) -> str:
        path = tmp_path / ("rows.parquet" if parquet else "rows.jsonl")
        if parquet:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)
        else:
            path.write_text("\n".join(map(json.dumps, found)))
        done = forked.run("-m", "dschat.data", path.name, *flags, cwd=str(tmp_path))
        return done.stdout + done.stderr

    return report


CHAT = "<|user|>What is "


def trl_prompts(read):
    said = read(rows(lambda ask, right, _: {"prompt": [ask], "truth": right["content"]}))
    assert CHAT in said
    assert "for reward functions: truth" in said


def trl_pairs(read):
    explicit = rows(lambda ask, *two: {"prompt": [ask], "chosen": [two[0]], "rejected": [two[1]]})
    implicit = rows(lambda ask, good, bad: {"chosen": [ask, good], "rejected": [ask, bad]})
    for pairs in (explicit, implicit):
        said = read(pairs)
        assert CHAT in said
        assert "cannot use" not in said


def trl_kto(read):
    single = rows(lambda ask, good, _: {"prompt": [ask], "completion": [good], "label": True})
    assert "chosen <- completion, label <- label" in read(single)


def sharegpt(read):
    def row(ask, good, _):
        turns = (("human", ask), ("gpt", good))
        return {"conversations": [{"from": who, "value": t["content"]} for who, t in turns]}

    said = read(rows(row))
    assert "messages <- conversations" in said
    assert CHAT in said


def verl_rows(read, rewards, samples, others):
    truth = {"style": "rule", "ground_truth": "a0"}
    row = {"data_source": "math", "reward_model": truth, "extra_info": {"split": "train"}}
    found = rows(lambda ask, *_: {"prompt": [ask], **row})
    said = read(found, "--step", "3", parquet=True)
    assert CHAT in said
    assert "data_source, extra_info, reward_model" in said
    given = samples(2, **{name: [value] * 2 for name, value in row.items()})
    assert scores_of(rewards(reward_fn=[f"{others}:compute_score"]), given) == [[1, 0]]


def openrlhf_rows(read):
    found = rows(lambda ask, *_: {"context_messages": [ask], "label": "a"})
    assert "--columns prompt=COLUMN" in read(found, "--step", "3")
    assert CHAT in read(found, "--step", "3", "--columns", "prompt=context_messages")


def trl_on_chats(rewards, samples, others):
    chats = samples(2, solution=["a0", "x"])
    chats.chats = [[turn("user", prompt)] for prompt in chats.prompts]
    assert scores_of(rewards(reward_fn=[f"{others}:accuracy"]), chats) == [[1, 0]]
    assert chats.pick([1]).completions == [[turn("assistant", "a1")]]


def trl_on_text(rewards, samples, others):
    assert scores_of(rewards(reward_fn=[f"{others}:shortness"]), samples(2)) == [[-2, -2]]


def trainer_state(rewards, samples):
    def score(completions, trainer_state):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    made = rewards([score])
    vars(made.logs.trainer_state).update(global_step=3, max_steps=4)
    assert scores_of(made, samples(2)) == [[0.75, 0.75]]


def reward_func(rewards, samples):
    def as_tensor(queries, prompts, labels):
        whole = map(str.__add__, prompts, labels)
        return torch.tensor([float(q == w) for q, w in zip(queries, whole, strict=True)])

    assert scores_of(rewards([as_tensor]), samples(2, label=["a0", "b"])) == [[1, 0]]


def compute_score(rewards, samples):
    def number(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth) + len(extra_info or ())

    given = samples(2, answer=["a0", "b"], extra_info=[{"split": "train"}, None])
    assert scores_of(rewards([number]), given) == [[2, 0]]


def compute_scores(rewards, samples):
    def numbers(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == ["", ""]
        assert extra_infos == [{"split": "train"}, None]
        return torch.tensor([float(s == t) for s, t in zip(solution_strs, ground_truths)])  # noqa: B905

    given = samples(2, answer=["a0", "b"], extra_info=[{"split": "train"}, None])
    assert scores_of(rewards([numbers]), given) == [[1, 0]]


def names_of_trl():
    for name, here in {"num_generations": "num_samples_per_prompt", "beta": "kl_coef"}.items():
        with pytest.raises(UserError, match=f"unknown setting {name}; use {here}"):
            GRPOTrainer("model", "data", reward_fns=[len], **{name: 1})


def python_rows(own_cache):
    prompts = [{"prompt": "why?"}, {"prompt": "how?"}]
    for given in (prompts, Dataset.from_list(prompts), DataFrame(prompts)):
        trainer = GRPOTrainer("model", given, reward_fns=len)
        (path,) = trainer.config.data_path
        assert path.endswith(("-rows.jsonl", "-rows.parquet"))


def loaded_models():
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin/tiny"))
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    trainer = SFTTrainer(model, processing_class=tokenizer, output_dir="out")
    assert trainer.config.model_name_or_path == os.path.abspath("out/initial_model")


def arguments_of_trl():
    both = {"train_dataset": "data", "eval_dataset": "more"}
    config = GRPOTrainer("model", reward_funcs=len, **both).config
    assert (config.data_path, config.eval_data_path) == (["data"], ["more"])


TRIED = (
    (trl_prompts, "TRL's rows for GRPO"),
    (trl_pairs, "TRL's pairs"),
    (trl_kto, "TRL's rows for KTO"),
    (sharegpt, "ShareGPT's `conversations`"),
    (verl_rows, "verl's Parquet rows"),
    (openrlhf_rows, "OpenRLHF's `context_messages`"),
    (trl_on_chats, "a reward function of TRL, and chats"),
    (trl_on_text, "a reward function of TRL, and text"),
    (trainer_state, "one that needs `trainer_state`"),
    (reward_func, "`reward_func` of OpenRLHF"),
    (compute_score, "`compute_score` of verl"),
    (compute_scores, "verl's batch form"),
    (python_rows, "rows in Python"),
    (loaded_models, "a loaded model"),
    (arguments_of_trl, "`train_dataset`, `eval_dataset`"),
    (names_of_trl, "settings by TRL's names"),
)

# They start processes, or train.
SLOW = (trl_pairs, trl_kto, sharegpt, verl_rows, openrlhf_rows, loaded_models)


@pytest.mark.parametrize(
    ("example", "begins"),
    some(TRIED, [case for case in TRIED if case[0] not in SLOW]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_happens(example, begins, request):
    names = example.__code__.co_varnames[: example.__code__.co_argcount]
    example(**{name: request.getfixturevalue(name) for name in names})


def test_every_row_is_tried():
    """In the order of the table."""
    assert len(TRIED) == len(TABLE)
    assert all(row.startswith(begins) for row, (_, begins) in zip(TABLE, TRIED, strict=True))
