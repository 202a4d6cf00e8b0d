"""What a data set's columns mean: the table of known data sets, and the form all rows take.

Comes in: a raw row (a dict) and the adapter of its source. Goes out: an ``Example``'s fields, or
the reason why the row is of no use. Pure functions of rows. Must not know files, blends, splits or
tokenizers.

A data set is one row of ``ADAPTERS``; files and unknown hub names take the first row of ``GENERIC``
that fits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional, Union

from dschat.config import CommonConfig, UserError

Content = Union[str, list[dict[str, str]]]  # plain text, or chat messages {"role", "content"}
Purpose = Literal["sft", "reward", "rlhf"]
PURPOSES: tuple[Purpose, ...] = (
    "sft",
    "reward",
    "rlhf",
)  # steps 1, 2, 3, as --data_split orders them
CONTENT_FIELDS = ("prompt", "chosen", "rejected")


@dataclass
class Example:
    """A prompt, the preferred answer and another one: all text, or all chat messages.

    ``chosen`` and ``rejected`` are None where a step does not need them. As messages, an answer is
    a list of one assistant turn. In a table each field is a JSON string, so that one schema holds
    both forms.
    """

    prompt: Content
    chosen: Optional[Content] = None
    rejected: Optional[Content] = None

    def to_row(self) -> dict[str, str]:
        return {f: json.dumps(getattr(self, f)) for f in CONTENT_FIELDS}

    @classmethod
    def from_row(cls, row: dict[str, str]) -> "Example":
        return cls(*(json.loads(row[f]) for f in CONTENT_FIELDS))


@dataclass(frozen=True)
class Adapter:
    """Which column holds what. Answers may be text or message lists, whole dialogues included."""

    prompt: Optional[str] = None
    chosen: Optional[str] = None
    rejected: Optional[str] = None
    messages: Optional[str] = None  # a whole dialogue: its last assistant turn is the answer
    sft: Optional[str] = None  # the answer that step 1 learns, where it is not `chosen`
    as_chat: bool = False  # the prompt is what a user said: make it a turn of a chat

    @property
    def columns(self) -> list[str]:
        roles = (self.prompt, self.chosen, self.rejected, self.messages, self.sft)
        return [column for column in roles if column]


ADAPTERS = {
    "builtin/chat": Adapter("prompt", "chosen", "rejected", sft="demonstration", as_chat=True),
    "Dahoas/rm-static": Adapter("prompt", "chosen", "rejected"),
    "Dahoas/full-hh-rlhf": Adapter("prompt", "chosen", "rejected"),
    "Dahoas/synthetic-instruct-gptj-pairwise": Adapter(
        "prompt", "chosen", "rejected", as_chat=True
    ),
}
GENERIC = (
    Adapter("prompt", "chosen", "rejected"),
    Adapter(chosen="chosen", rejected="rejected"),  # two dialogues that differ in the last turn
    Adapter("prompt", "chosen"),
    Adapter("prompt", "completion"),
    Adapter("prompt", "response"),
    Adapter("prompt", "answer"),
    Adapter(messages="messages"),
    Adapter("prompt"),
)


def choose_adapter(
    name: str, columns: Sequence[str], config: CommonConfig, flag: str = "--data_path"
) -> Adapter:
    """A source's own adapter, or the first generic one that fits; column flags override.

    Raises:
        UserError: a named column is missing, or nothing fits; the line lists the columns there are.
    """
    present = ", ".join(columns)
    given = {}
    for role in ("prompt", "chosen", "rejected", "messages"):
        column = getattr(config, f"{role}_column")
        if column is not None and column not in columns:
            raise UserError(f"--{role}_column {column!r} is not in {name}; it has: {present}")
        if column is not None:
            given[role] = column
    if "messages" in given:
        return Adapter(messages=given["messages"])
    own = ADAPTERS.get(name)
    for row in (own,) if own else GENERIC:
        # a dialogue row has no columns for these flags to stand in for
        adapter = row if row.messages and given else replace(row, **given)
        if set(adapter.columns) <= set(columns) and set(given.values()) <= set(adapter.columns):
            return adapter
    if own:
        raise UserError(f"{flag}: {name} should have {', '.join(own.columns)}; it has: {present}")
    raise UserError(
        f"{flag}: {name} has the columns {present}; name those that hold the data with "
        "--prompt_column, --chosen_column and --rejected_column, or --messages_column"
    )


def require_answers(
    name: str, adapter: Adapter, purpose: Purpose, columns: Sequence[str], flag: str
) -> None:
    """Refuse a source that has no column at all for the answers that ``purpose`` learns from."""
    needs = {
        "sft": {"chosen": adapter.chosen or adapter.sft or adapter.messages},
        "reward": {"chosen": adapter.chosen, "rejected": adapter.rejected},
        "rlhf": {},
    }[purpose]
    for role, column in needs.items():
        if not column:
            step = PURPOSES.index(purpose) + 1
            raise UserError(
                f"{flag}: {name} has no {role} answers, which step {step} needs; "
                f"name their column with --{role}_column (it has: {', '.join(columns)})"
            )


def normalise(row: dict[str, Any], adapter: Adapter, purpose: Purpose) -> dict[str, str]:
    """One raw row as an ``Example`` row with its ``key`` and ``problem``.

    ``problem`` says why ``purpose`` cannot use the row, "" if it can.

    Rows with equal keys share their prompt (dialogues: their opening, up to the first answer) and
    must not be parted. The key is the same for every purpose; it is "" where the row has no usable
    prompt.
    """
    example, demonstration = _read_row(row, adapter)
    key = _opening(example.prompt) if example.prompt else ""
    if not key:
        return {**Example("").to_row(), "key": "", "problem": "no usable prompt"}
    problem = ""
    if purpose == "sft":
        example = _demonstration(example, demonstration)
    if purpose != "rlhf" and not example.chosen:
        problem = "an empty or unreadable answer"
    elif purpose == "reward" and not example.rejected:
        problem = "an empty or unreadable rejected answer"
    return {**example.to_row(), "key": key, "problem": problem}


def _read_row(row: dict[str, Any], adapter: Adapter) -> tuple[Example, Optional[Content]]:
    """The row all in text or all in messages (None where unusable), and its sft answer."""
    fields = (adapter.prompt, adapter.chosen, adapter.rejected, adapter.sft)
    prompt, chosen, rejected, sft = (_content(row[c]) if c else None for c in fields)
    if adapter.messages:
        dialogue = _content(row[adapter.messages])
        if not isinstance(dialogue, list):
            return Example(""), None
        return Example(*_part(dialogue)), None
    if isinstance(prompt, str) and (
        adapter.as_chat or any(isinstance(answer, list) for answer in (chosen, rejected, sft))
    ):
        prompt = [{"role": "user", "content": prompt}] if prompt.strip() else None
    if isinstance(prompt, str):
        return Example(prompt, _filled(chosen), _filled(rejected)), _filled(sft)
    prompts, answers = zip(*(_answer_turn(prompt, a) for a in (chosen, rejected, sft)), strict=True)
    prompt = prompts[0] or prompt or ""
    # an answer to another prompt is no use beside this one
    chosen, rejected, sft = (
        a if p == prompt else None for p, a in zip(prompts, answers, strict=True)
    )
    return Example(prompt, chosen, rejected), sft


def _content(value: Any) -> Optional[Content]:
    """Text as it is, a chat as plain {"role", "content"} turns, None for anything else."""
    if isinstance(value, str):
        return value
    turns = value if isinstance(value, list) else []
    if not all(isinstance(t, dict) for t in turns):
        return None
    if not all(isinstance(t.get(k), str) for t in turns for k in ("role", "content")):
        return None
    return [{"role": t["role"], "content": t["content"]} for t in turns] or None


def _filled(answer: Optional[Content]) -> Optional[Content]:
    """``answer``, or None if it is blank."""
    return answer if isinstance(answer, str) and answer.strip() else None


def _part(dialogue: list[dict[str, str]]) -> tuple[list, Optional[list]]:
    """A dialogue's prompt and last answer; one that ends with the user's turn is all prompt."""
    if dialogue and dialogue[-1]["role"] == "assistant":
        return dialogue[:-1], dialogue[-1:] if dialogue[-1]["content"].strip() else None
    return dialogue, None


def _answer_turn(prompt: Optional[list], answer: Optional[Content]) -> tuple[Optional[list], Any]:
    """The (prompt, answer turn) of a text, a continuation of ``prompt`` or a whole dialogue."""
    if not answer or isinstance(answer, str):
        turn = [{"role": "assistant", "content": answer}] if _filled(answer) else None
        return prompt, turn
    continues = prompt and answer[0]["role"] == "assistant"
    return _part(prompt + answer if continues else answer)


def _demonstration(example: Example, demonstration: Optional[Content]) -> Example:
    """What SFT learns: demonstration or chosen answer, or an unanswered dialogue's last one."""
    answer = demonstration or example.chosen
    prompt = example.prompt
    if not answer and isinstance(prompt, list):
        ends = [i for i, turn in enumerate(prompt) if turn["role"] == "assistant" and i]
        if ends:
            prompt, answer = _part(prompt[: ends[-1] + 1])
    return Example(prompt, answer)


def _opening(prompt: Content) -> str:
    """The text that tells prompts apart: all of it, or a dialogue up to its first answer."""
    if isinstance(prompt, str):
        return prompt.strip()
    answers = [i for i, turn in enumerate(prompt) if turn["role"] == "assistant" and i]
    turns = prompt[: answers[0]] if answers else prompt
    return "\n".join(turn["content"] for turn in turns).strip()
