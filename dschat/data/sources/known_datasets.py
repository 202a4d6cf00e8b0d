"""Lists the known data sets: which column holds the prompt, which the answers.

``ADAPTERS`` goes by hub name, ``GENERIC`` by columns. A row may carry a pure function that rewrites
raw rows if naming columns is not enough.

A column may be a path into its value: ``answers.0.text`` is the text of the first answer,
``answers.*.text`` the list of all texts.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

from dschat.config import UserError
from dschat.config.data import ROLES, DataConfig, columns_by_role, look_up
from dschat.data.sources.turns import Unusable, vicuna_turns

logger = logging.getLogger("dschat")

Row = dict[str, Any]


@dataclass(frozen=True)
class ColumnAdapter:
    """Role -> column. Answers may be text, messages or whole dialogues."""

    prompt: Optional[str] = None
    chosen: Optional[str] = None
    rejected: Optional[str] = None
    messages: Optional[str] = None  # a whole dialogue: its last assistant turn is the answer
    answers: Optional[str] = None  # a list of answers, with `ranks` or `scores` in place of pairs
    ranks: Optional[str] = None  # one number per answer, the lowest for the best
    scores: Optional[str] = None  # one number per answer, the highest for the best
    sft: Optional[str] = None  # the answer that step 1 trains on, if not `chosen`
    as_chat: bool = False  # turn the prompt into the user turn of a chat
    context: Optional[str] = None  # text appended to an `as_chat` prompt
    label: Optional[str] = None  # says whether a row's one answer is good, see `_LABELS`
    completion_alone: bool = False  # the assistant's turns in the prompt have no loss
    rewrite: Optional[Callable[[Row], Row]] = None  # new values for some columns of a row
    reads: tuple[str, ...] = ()  # further columns that `rewrite` needs
    source: Optional[str] = None  # NAME or NAME:CONFIG to load the rows from instead
    eval_split: str = "test"  # the held-out split to prefer

    @property
    def roles(self) -> dict[str, str]:
        """Role -> column, for the roles that have one."""
        names = (*ROLES, "sft", "context", "label")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def columns(self) -> list[str]:
        return [*dict.fromkeys([*self.roles.values(), *self.reads])]

    def match_case(self, columns: Sequence[str]) -> "ColumnAdapter":
        """A copy with the spelling of ``columns``: matching ignores case."""
        by_lower = {column.lower(): column for column in columns}
        spelling: dict[str, Any] = {
            role: by_lower[column.lower()]
            for role, column in self.roles.items()
            if column not in columns and column.lower() in by_lower
        }
        return replace(self, **spelling) if not self.rewrite else self


def _by_score(row: Row) -> Row:
    """WebGPT: the answer with the higher score first; citations such as [1] or [2, 3] removed."""
    first, second = (_uncited(row.get(column)) for column in ("answer_0", "answer_1"))
    try:
        difference = float(row["score_0"]) - float(row["score_1"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return {"answer_0": first, "answer_1": Unusable("a score is missing")}
    if difference < 0:
        first, second = second, first
    return {"answer_0": first, "answer_1": second if difference else Unusable("scores that tie")}


def _uncited(answer: Any) -> Any:
    return re.sub(r" ?\[[\d, ]+\]", "", answer) if isinstance(answer, str) else answer


def _by_label(row: Row) -> Row:
    """SHP: label 1 means that annotators preferred A."""
    a, b, label = row.get("human_ref_A"), row.get("human_ref_B"), str(row.get("labels"))
    if label not in ("0", "1"):
        a, b = Unusable("a label that is neither 0 nor 1"), None
    chosen, rejected = (b, a) if label == "0" else (a, b)
    return {"human_ref_A": chosen, "human_ref_B": rejected}


def _move_name_to_prompt(row: Row) -> Row:
    """``Assistant:`` moves from the start of the answers to the end of the prompt."""
    mark = "Assistant:"
    answers = {
        column: row[column].split(mark)[-1] if isinstance(row.get(column), str) else None
        for column in ("chosen", "rejected")
    }
    prompt = row.get("prompt")
    return {**answers, "prompt": prompt + mark if isinstance(prompt, str) and prompt else None}


def _vicuna(row: Row) -> Row:
    """Prompts are dialogues of USER: and ASSISTANT:, answers end with </s>."""
    label = row.get("label")
    label = label.removesuffix("</s>") if isinstance(label, str) else label
    return {"prompt": vicuna_turns(row.get("prompt")), "label": label}


_PAIRS = ColumnAdapter("prompt", "chosen", "rejected")
_MIRACL = ColumnAdapter(
    "query",
    "positive_passages.0.text",
    "negative_passages.0.text",
    as_chat=True,
    eval_split="dev",
)
_MKQA = ColumnAdapter("queries.zh_cn", "answers.zh_cn.0.text", as_chat=True, source="apple/mkqa")
_WEBGPT = ColumnAdapter(
    "question.full_text",
    "answer_0",
    "answer_1",
    as_chat=True,
    rewrite=_by_score,
    reads=("score_0", "score_1"),
)
_SHP = ColumnAdapter(
    "history",
    "human_ref_A",
    "human_ref_B",
    as_chat=True,
    rewrite=_by_label,
    reads=("labels",),
    eval_split="validation",
)
_HC3 = ColumnAdapter(
    "question", "human_answers.0", as_chat=True, source="Hello-SimpleAI/HC3-Chinese:all"
)
_QUESTION_PAIRS = ColumnAdapter("question", "chosen", "rejected", as_chat=True)
_ALPACA = ColumnAdapter("instruction", "output", as_chat=True, context="input")
_ULTRAFEEDBACK = ColumnAdapter(
    "instruction",
    answers="completions.*.response",
    scores="completions.*.overall_score",
    as_chat=True,
)

ADAPTERS = {
    "builtin/chat": ColumnAdapter(
        "prompt", "chosen", "rejected", sft="demonstration", as_chat=True, context="history"
    ),
    "builtin/arithmetic": ColumnAdapter("prompt", sft="demonstration", as_chat=True),
    "builtin/addition": ColumnAdapter("prompt", sft="reference", as_chat=True),
    # the data sets of DeepSpeed-Chat
    "Dahoas/rm-static": _PAIRS,
    "Dahoas/full-hh-rlhf": _PAIRS,
    "Dahoas/synthetic-instruct-gptj-pairwise": replace(_PAIRS, as_chat=True),
    "yitingxie/rlhf-reward-datasets": replace(_PAIRS, rewrite=_move_name_to_prompt),
    "openai/webgpt_comparisons": _WEBGPT,
    "stanfordnlp/SHP": _SHP,
    "pvduy/sharegpt_alpaca_oa_vicuna_format": ColumnAdapter(
        "prompt", "label", as_chat=True, rewrite=_vicuna
    ),
    "wangrui6/Zhihu-KOL": ColumnAdapter("INSTRUCTION", "RESPONSE", as_chat=True),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": _HC3,
    "mkqa-Chinese": _MKQA,
    "mkqa-Japanese": replace(_MKQA, prompt="queries.ja", chosen="answers.ja.0.text"),
    "lmqg/qg_jaquad": ColumnAdapter("question", "sentence", as_chat=True, eval_split="validation"),
    "lmqg/qag_jaquad": ColumnAdapter(
        "questions.0", "paragraph", as_chat=True, eval_split="validation"
    ),
    "local/jsonfile": replace(_PAIRS, source="./data"),  # ./data/train.json, ./data/eval.json
    # current data sets whose columns are ambiguous
    "Intel/orca_dpo_pairs": _QUESTION_PAIRS,
    "tatsu-lab/alpaca": _ALPACA,
    # ranked answers
    "openbmb/UltraFeedback": _ULTRAFEEDBACK,
    "berkeley-nest/Nectar": ColumnAdapter(
        "prompt", answers="answers.*.answer", ranks="answers.*.rank"
    ),
}

# What labels say of answers, as text; and their columns: LLaMA-Factory's, TRL's and ms-swift's.
_LABELS = {
    **dict.fromkeys(("true", "1", "1.0", "good"), True),
    **dict.fromkeys(("false", "0", "0.0", "bad"), False),
}
_LABEL_COLUMNS = ("kto_tag", "label")

CHATS = ("messages", "conversations", "conversation", "dialogue")
_ANSWERED = {
    "question": ("answer", "response"),
    "problem": ("solution", "answer"),
    "query": ("response", "answer"),
    "input": ("output",),
}
GENERIC = (
    _WEBGPT,
    _SHP,
    _MIRACL,
    # chosen and rejected answers
    _PAIRS,
    _QUESTION_PAIRS,
    ColumnAdapter("instruction", "chosen_response", "rejected_response", as_chat=True),
    *(replace(_PAIRS, prompt=name) for name in CHATS),
    ColumnAdapter(chosen="chosen", rejected="rejected"),  # dialogues that differ in the last turn
    # ranked answers
    *(
        replace(by, prompt=prompt, answers=answers, as_chat=prompt != "prompt")
        for prompt in ("prompt", "instruction", "question")
        for answers in ("answers", "responses", "completions")
        for by in (ColumnAdapter(ranks="ranks"), ColumnAdapter(scores="scores"))
    ),
    _ULTRAFEEDBACK,
    # one answer
    ColumnAdapter("prompt", "chosen"),
    *(ColumnAdapter("prompt", answer) for answer in ("completion", "response", "answer", "output")),
    _ALPACA,
    ColumnAdapter("instruction", "response", as_chat=True, context="context"),
    *(ColumnAdapter("instruction", answer, as_chat=True) for answer in ("output", "response")),
    _HC3,
    *(
        ColumnAdapter(prompt, answer, as_chat=True)
        for prompt, answers in _ANSWERED.items()
        for answer in answers
    ),
    # whole dialogues
    *(ColumnAdapter(messages=name) for name in CHATS),
    # prompts only, for step 3
    ColumnAdapter("prompt"),
    *(ColumnAdapter(p, as_chat=True) for p in ("question", "problem", "instruction", "query")),
    ColumnAdapter(messages="text"),  # a dialogue as text, Human: ... Assistant: ...
)
_PROMPTS = [adapter for adapter in GENERIC if adapter.roles.keys() == {"prompt"}]


def choose_adapter(
    name: str, columns: Sequence[str], config: DataConfig, flag: str = "--data_path"
) -> ColumnAdapter:
    """The adapter of a known data set, or the first generic one that fits; --columns overrides.

    Raises:
        UserError: a named column is missing, or nothing fits; the line lists the source's columns.
    """
    present = listed(columns)
    given = columns_by_role(config.columns)
    for role, column in given.items():
        if not _has(columns, column):
            raise UserError(f"--columns {role}={column} is not in {name}; it has: {present}")
    if "messages" in given:
        return ColumnAdapter(messages=given["messages"])
    known = None if "answers" in given else known_adapter(name)
    generic = _PROMPTS if "answers" in given else GENERIC
    rows = [known] if known else [row.match_case(columns) for row in generic]
    # first those that name most of the given columns themselves
    for row in sorted(rows, key=lambda row: -len(given.items() & row.roles.items())):
        # a dialogue row has no columns that these flags could override
        adapter = row if row.messages and given else replace(row, **given)
        fits = all(_has(columns, column) for column in adapter.columns)
        if fits and set(given.values()) <= set(adapter.columns):
            return adapter if "chosen" in given else _with_label(adapter, columns)
    if known:
        raise UserError(f"{flag}: {name} should have {', '.join(known.columns)}; it has: {present}")
    raise UserError(
        f"{flag}: {name} has the columns {present}; name those that hold the data with "
        "--columns prompt=COLUMN chosen=COLUMN rejected=COLUMN, or messages=COLUMN, or "
        "answers=COLUMN scores=COLUMN"
    )


def _with_label(adapter: ColumnAdapter, columns: Sequence[str]) -> ColumnAdapter:
    """``adapter`` with the column of labels, if its rows have one answer and such a column."""
    has_one = (adapter.chosen or adapter.messages) and not (adapter.rejected or adapter.answers)
    others = {column.lower(): column for column in columns if column not in adapter.columns}
    named = [others[name] for name in _LABEL_COLUMNS if name in others]
    return replace(adapter, label=named[0]) if has_one and named else adapter


def checked_label(name: str, adapter: ColumnAdapter, rows: Iterable[Row]) -> ColumnAdapter:
    """``adapter`` without its column of labels where that has other values, such as classes, or
    none. Beside ``completion``, as in TRL, it is known to have labels.
    """
    if not adapter.label or (adapter.chosen, adapter.label) == ("completion", "label"):
        return adapter
    has_labels = False
    for row in rows:
        label = label_of(row, adapter)
        if label and isinstance(label, str):
            logger.info(
                "%s: its column %s has the value %.40r, so it does not label answers: all are read",
                *(name, adapter.label, label),
            )
            return replace(adapter, label=None)
        has_labels |= label != ""
    return adapter if has_labels else replace(adapter, label=None)


def label_of(row: Row, adapter: ColumnAdapter) -> Union[bool, str]:
    """Whether a row's answer is good; a text where its label does not say it, "" without one."""
    value = look_up(row, adapter.label)
    text = "" if value is None else str(value).strip().lower()
    return _LABELS.get(text, text)


def known_adapter(name: str) -> Optional[ColumnAdapter]:
    """The row of the table for a hub name, NAME:CONFIG, or a local copy at .../OWNER/NAME."""
    copy = "/".join(name.rstrip("/").split("/")[-2:])
    return ADAPTERS.get(name.partition(":")[0]) or ADAPTERS.get(copy)


def listed(columns: Sequence[str]) -> str:
    """The first twenty column names, for a message."""
    more = f", and {len(columns) - 20} more" if len(columns) > 20 else ""
    return ", ".join(columns[:20]) + more


def _has(columns: Sequence[str], path: str) -> bool:
    return path in columns or path.partition(".")[0] in columns
