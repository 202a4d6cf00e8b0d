"""Every known data set, with a few rows in its real layout, for each step that can use it."""

import json
from pathlib import Path

import data_files
import datasets
import pytest
from dialogues import HH, REPLY, SYSTEM, USER, chat
from ranked_sets import RANKED_COLUMNS, RANKED_SETS

from dschat.config import CommonConfig, UserError
from dschat.data.sources.adapters import Example
from dschat.data.sources.known_datasets import ADAPTERS
from dschat.data.sources.splits import load_examples

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SFT, RM, PPO = "sft", "reward", "rlhf"

PASSAGES = [{"docid": "7#0", "title": "t", "text": "richtig"}, {"docid": "8", "text": "nicht"}]
WEBGPT = {
    "question": {"dataset": "eli5", "id": "x", "full_text": "why?"},
    "quotes_0": {"title": []},
}
SHP = {
    "post_id": "x",
    "history": "why?",
    "human_ref_A": "a",
    "human_ref_B": "b",
    "score_ratio": 2.0,
}
MKQA = {
    "queries": {"en": "who", "zh_cn": "谁", "ja": "誰"},
    "answers": {
        "zh_cn": [{"type": 1, "entity": "", "text": "甲", "aliases": []}],
        "ja": [{"type": 1, "entity": "", "text": "乙", "aliases": []}],
    },
}
NO_MKQA = {"queries": MKQA["queries"], "answers": {"zh_cn": [{"text": None}], "ja": []}}

# name -> rows in its layout, and the examples of each step
KNOWN = {
    **RANKED_SETS,
    **dict.fromkeys(
        ("Dahoas/rm-static", "Dahoas/full-hh-rlhf", "local/jsonfile"),
        (
            [{"prompt": HH, "response": " yes", "chosen": " yes", "rejected": " no"}],
            {SFT: [Example(HH, " yes")], RM: [Example(HH, " yes", " no")]},
        ),
    ),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        [{"prompt": "why?", "chosen": "yes", "rejected": "no"}],
        {SFT: [chat("why?", "yes")], RM: [chat("why?", "yes", "no")]},
    ),
    "yitingxie/rlhf-reward-datasets": (
        [
            {
                "prompt": "\n\nHuman: why?\n\n",
                "chosen": "Assistant: yes",
                "rejected": "Assistant: no",
            },
            {"prompt": None, "chosen": "Assistant: yes", "rejected": "Assistant: no"},
        ],
        {
            SFT: [Example("\n\nHuman: why?\n\nAssistant:", " yes")],
            RM: [Example("\n\nHuman: why?\n\nAssistant:", " yes", " no")],
        },
    ),
    "openai/webgpt_comparisons": (
        [
            {
                **WEBGPT,
                "answer_0": "a [1].",
                "score_0": -0.5,
                "answer_1": "b[2, 3]",
                "score_1": 0.5,
            },
            {**WEBGPT, "answer_0": "c (so)", "score_0": 1.0, "answer_1": "d", "score_1": -1.0},
            {**WEBGPT, "answer_0": "tie", "score_0": 0.0, "answer_1": "eit", "score_1": 0.0},
        ],
        {
            SFT: [chat("why?", "b"), chat("why?", "c (so)"), chat("why?", "tie")],
            RM: [chat("why?", "b", "a."), chat("why?", "c (so)", "d")],
        },
    ),
    "stanfordnlp/SHP": (
        [{**SHP, "labels": 1}, {**SHP, "labels": 0}],
        {
            SFT: [chat("why?", "a"), chat("why?", "b")],
            RM: [chat("why?", "a", "b"), chat("why?", "b", "a")],
        },
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        [
            {"prompt": "USER: why? ASSISTANT:", "label": "because</s>"},
            {"prompt": "USER: why? ASSISTANT: so</s>USER: oh? ASSISTANT:", "label": "yes"},
            {"prompt": "", "label": "yes"},
            {"prompt": "USER: x ASSISTANT:", "label": None},
        ],
        {
            SFT: [
                chat("why?", "because"),
                Example([USER("why?"), REPLY("so"), USER("oh?")], [REPLY("yes")]),
            ]
        },
    ),
    "wangrui6/Zhihu-KOL": (
        [
            {"INSTRUCTION": "为什么", "RESPONSE": "因为", "SOURCE": "Zhihu", "METADATA": "{}"},
            {"INSTRUCTION": "x", "RESPONSE": None, "SOURCE": "Zhihu", "METADATA": "{}"},
        ],
        {SFT: [chat("为什么", "因为")]},
    ),
    **{
        f"Cohere/miracl-{language}-queries-22-12": (
            [
                {
                    "query_id": "1",
                    "query": "q",
                    "positive_passages": PASSAGES,
                    "negative_passages": PASSAGES[1:],
                    "emb": [0.1],
                },
                {
                    "query_id": "2",
                    "query": "r",
                    "positive_passages": PASSAGES[:1],
                    "negative_passages": [],
                    "emb": [0.1],
                },
            ],
            {
                SFT: [chat("q", "richtig"), chat("r", "richtig")],
                RM: [chat("q", "richtig", "nicht")],
            },
        )
        for language in ("zh", "ja")
    },
    "Hello-SimpleAI/HC3-Chinese": (
        [
            {"id": "0", "question": "q", "human_answers": ["一", "二"], "chatgpt_answers": ["c"]},
            {"id": "1", "question": "r", "human_answers": [], "chatgpt_answers": ["c"]},
        ],
        {SFT: [chat("q", "一")]},
    ),
    "mkqa-Chinese": ([MKQA, NO_MKQA], {SFT: [chat("谁", "甲")]}),
    "mkqa-Japanese": ([MKQA, NO_MKQA], {SFT: [chat("誰", "乙")]}),
    "lmqg/qg_jaquad": (
        [{"question": "q", "answer": "a", "sentence": "s", "paragraph": "p", "paragraph_id": "1"}],
        {SFT: [chat("q", "s")]},
    ),
    "lmqg/qag_jaquad": (
        [{"questions": ["q", "r"], "answers": ["a", "b"], "paragraph": "p", "paragraph_id": "1"}],
        {SFT: [chat("q", "p")]},
    ),
    "Intel/orca_dpo_pairs": (
        [
            {"system": "be kind", "question": "q", "chosen": "a", "rejected": "b"},
            {"system": "", "question": "q", "chosen": "a", "rejected": "b"},
        ],
        {
            RM: [
                Example([SYSTEM("be kind"), USER("q")], [REPLY("a")], [REPLY("b")]),
                chat("q", "a", "b"),
            ]
        },
    ),
    "tatsu-lab/alpaca": (
        [
            {"instruction": "add", "input": "1 2", "output": "3", "text": "Below is ..."},
            {"instruction": "hi", "input": "", "output": "hello", "text": "Below is ..."},
        ],
        {SFT: [chat("add\n\n1 2", "3"), chat("hi", "hello")]},
    ),
}

TURNS = [USER("u"), REPLY("r"), USER("v")]
# recognized by their columns, not by name
FOUND_BY_COLUMNS = {
    **RANKED_COLUMNS,
    "Anthropic/hh-rlhf": (
        [
            {"chosen": HH + " yes", "rejected": HH + " no"},
            {"chosen": HH + " yes", "rejected": "\n\nHuman: other\n\nAssistant: no"},
        ],
        {SFT: [Example(HH, " yes")] * 2, RM: [Example(HH, " yes", " no")], PPO: [Example(HH)] * 2},
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        [
            {
                "prompt": "u",
                "prompt_id": "x",
                "chosen": [USER("u"), REPLY("yes")],
                "rejected": [USER("u"), REPLY("no")],
                "messages": [USER("u"), REPLY("yes")],
                "score_chosen": 9.0,
                "score_rejected": 2.0,
            }
        ],
        {SFT: [chat("u", "yes")], RM: [chat("u", "yes", "no")], PPO: [chat("u")]},
    ),
    "trl-lib/ultrafeedback_binarized": (
        [
            {
                "chosen": [USER("u"), REPLY("yes")],
                "rejected": [USER("u"), REPLY("no")],
                "score_chosen": 9.0,
            }
        ],
        {RM: [chat("u", "yes", "no")]},
    ),
    "trl-lib/tldr": (
        [{"prompt": "POST: x\nTL;DR:", "completion": " short"}],
        {SFT: [Example("POST: x\nTL;DR:", " short")], PPO: [Example("POST: x\nTL;DR:")]},
    ),
    "trl-lib/ultrafeedback-prompt": ([{"prompt": [USER("u")]}], {PPO: [chat("u")]}),
    "trl-lib's conversational prompt and completion": (
        [{"prompt": TURNS, "completion": [REPLY("w")]}],
        {SFT: [Example(TURNS, [REPLY("w")])], PPO: [Example(TURNS)]},
    ),
    "trl-lib/Capybara": (
        [{"source": "s", "messages": [*TURNS, REPLY("w")], "num_turns": 4}],
        {SFT: [Example(TURNS, [REPLY("w")])], PPO: [Example(TURNS)]},
    ),
    "OpenAI's chats": (
        [
            {"messages": [USER([{"type": "text", "text": "u"}]), REPLY("r")]},
            {"messages": [{"role": "developer", "content": "s"}, USER("u"), REPLY("r")]},
            {
                "messages": [
                    USER("u"),
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                ]
            },
            {"messages": [USER("u"), {"role": "tool", "content": "4"}, REPLY("r")]},
        ],
        {
            SFT: [
                chat("u", "r"),
                Example([SYSTEM("s"), USER("u")], [REPLY("r")]),
                Example([USER("u"), {"role": "tool", "content": "4"}], [REPLY("r")]),
            ]
        },
    ),
    "ShareGPT": (
        [
            {
                "id": "x",
                "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "r"}],
            },
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "u"},
                    {"from": "gpt", "value": "r"},
                ]
            },
        ],
        {
            SFT: [
                chat("u", "r"),
                Example([SYSTEM("s"), USER("u")], [REPLY("r")]),
            ]
        },
    ),
    "Open-Orca/OpenOrca": (
        [{"id": "1", "system_prompt": "s", "question": "q", "response": "a"}],
        {SFT: [Example([SYSTEM("s"), USER("q")], [REPLY("a")])]},
    ),
    "databricks/databricks-dolly-15k": (
        [{"instruction": "q", "context": "c", "response": "a", "category": "x"}],
        {SFT: [chat("q\n\nc", "a")]},
    ),
    "openai/gsm8k": ([{"question": "q", "answer": "a"}], {SFT: [chat("q", "a")], PPO: [chat("q")]}),
    "AI-MO/NuminaMath-CoT": (
        [{"source": "s", "problem": "q", "solution": "a", "messages": [USER("q"), REPLY("a")]}],
        {SFT: [chat("q", "a")], PPO: [chat("q")]},
    ),
    "open-r1/OpenR1-Math without solutions": (
        [{"problem": "q", "answer": "4", "level": 5}],
        {SFT: [chat("q", "4")], PPO: [chat("q")]},
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        [{"prompt": [USER("q")], "reward_model": {"ground_truth": "4"}, "ability": "MATH"}],
        {PPO: [chat("q")]},
    ),
    "a table with capitals": ([{"Question": "q", "Answer": "a"}], {SFT: [chat("q", "a")]}),
    "timdettmers/openassistant-guanaco": (
        [{"text": "### Human: q### Assistant: a"}, {"text": "just words"}],
        {SFT: [Example("### Human: q### Assistant:", " a")]},
    ),
    "a local copy of SHP": ([{**SHP, "labels": 0}], {RM: [chat("why?", "b", "a")]}),
    "prompts alone": ([{"prompt": "p", "id": 1}], {PPO: [Example("p")]}),
    "questions alone": ([{"question": "q"}], {PPO: [chat("q")]}),
    "problems and what checks them": ([{"problem": "q", "tests": []}], {PPO: [chat("q")]}),
}


def load(path, purpose, **knobs):
    examples = data_files.load(path, purpose, **knobs)
    return [Example(e.prompt) for e in examples] if purpose == PPO else examples


def cases(table):
    return [
        pytest.param(name, rows, step, expected, id=f"{name}-{step}")
        for name, (rows, steps) in table.items()
        for step, expected in steps.items()
    ]


def load_known(name, rows, step, **knobs):
    """Load a known data set, whose rows are in a folder that is called as its source: in Parquet,
    which fills in missing columns, as the hub does.
    """
    folder = Path(ADAPTERS[name].source or name)
    folder.mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return load(name, step, **knobs)


@pytest.mark.parametrize(("name", "rows", "step", "expected"), cases(KNOWN))
def test_known_by_name(name, rows, step, expected):
    assert load_known(name, rows, step) == expected


@pytest.mark.parametrize(("name", "rows", "step", "expected"), cases(FOUND_BY_COLUMNS))
def test_found_by_columns(name, rows, step, expected, write):
    assert load(write(rows), step) == expected


NO_REJECTED = [name for name, (_, steps) in KNOWN.items() if RM not in steps]


def test_every_known_data_set_is_tested():
    assert set(KNOWN) == set(ADAPTERS) - {
        "builtin/chat",
        "builtin/arithmetic",
        "builtin/addition",
    }
    assert len(NO_REJECTED) == 8


@pytest.mark.parametrize("name", NO_REJECTED)
def test_a_data_set_without_pairs_is_refused_in_step_2(name):
    words = "has no rejected answers, which step 2 needs; .* with --columns rejected="
    with pytest.raises(UserError, match=words) as caught:
        load_known(name, KNOWN[name][0], RM)
    assert name in str(caught.value)


def test_ties_are_counted_with_their_reason(caplog):
    name = "openai/webgpt_comparisons"
    load_known(name, KNOWN[name][0], RM)
    assert "1 with an empty or unreadable rejected answer (scores that tie)" in caplog.text
    assert f"{name}/train.parquet, row 3" in caplog.text
    with pytest.raises(UserError, match=r"row 3: .*scores that tie.*--on_bad_row skip"):
        load(name, RM, on_bad_row="error")


def test_a_column_may_be_a_path(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"q": {"text": "why?"}, "a": [{"t": "so"}]}))
    knobs = {"columns": ["prompt=q.text", "chosen=a.0.t"]}
    assert load(str(path), SFT, **knobs) == [Example("why?", "so")]
    with pytest.raises(UserError, match="--columns prompt=r.text is not in"):
        load(str(path), SFT, columns=["prompt=r.text"])


def test_local_jsonfile_reads_the_folder_data(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "eval"):
        row = {"prompt": split, "chosen": "a", "rejected": "b"}
        (tmp_path / "data" / f"{split}.json").write_text(json.dumps([row]))
    config = CommonConfig(data_path=["local/jsonfile"], data_split="1,0,0")
    train, held_out = load_examples(config, SFT)
    assert [Example.from_row(row).prompt for row in (*train, *held_out)] == ["train", "eval"]
