"""Maps a raw row's columns to an ``Example``, or says why the row is unusable.

A known data set has its own row in ``ADAPTERS`` (``known_datasets.py``); files and unknown hub
names use the first row of ``GENERIC`` that fits. All functions are pure.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional, TypeGuard, Union

from dschat.config.data import look_up
from dschat.data.sources.known_datasets import CHATS, ColumnAdapter, label_of
from dschat.data.sources.readers import Form
from dschat.data.sources.turns import (
    BEGINS,
    CHAT_COLUMNS,
    Content,
    Turn,
    Unusable,
    begun,
    chat_in_cell,
    from_cell,
    is_plain,
    masked,
    read_content,
    read_dialogue,
    read_template_kwargs,
    read_tools,
    split_text,
    storable,
    weight_of,
    without_nulls,
)

Purpose = Literal["sft", "reward", "rlhf"]
# Steps 1, 2, 3, in the order of --data_split.
PURPOSES: tuple[Purpose, ...] = ("sft", "reward", "rlhf")

Ranked = tuple[list[Any], list[int]]  # answers, best first, and their ranks from 0
Parsed = Union[Content, Unusable, None]


@dataclass
class Example:
    """A prompt with its chosen and rejected answers: all text, or all chat messages.

    ``chosen`` and ``rejected`` are None if a step does not need them. As messages, an answer is a
    list of one assistant turn. Of more than two ranked answers they are the best and the worst.
    Tables store it as JSON: one schema for both forms.
    """

    prompt: Content
    chosen: Optional[Content] = None
    rejected: Optional[Content] = None
    others: Optional[list[Content]] = None  # further ranked answers; None for a pair
    ranks: Optional[list[int]] = None  # of chosen, rejected and others, 0 the best; None for a pair
    tools: Optional[list[dict[str, Any]]] = None  # JSON schemas that the chat template shows
    template_kwargs: Optional[dict[str, Any]] = None  # further variables of the chat template
    columns: Optional[dict[str, Any]] = None  # in step 3 the row's others, for reward functions

    def to_row(self) -> dict[str, str]:
        # dates and bytes, which JSON cannot represent, become text
        return {"example": json.dumps(vars(self), default=str)}

    @property
    def answers(self) -> list[Content]:
        """Chosen, rejected and the others, without those that it lacks."""
        return [answer for answer in (self.chosen, self.rejected, *(self.others or ())) if answer]

    @property
    def inputs(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        return {"tools": self.tools, **(self.template_kwargs or {})}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Example":
        return cls(**json.loads(row["example"]))


def normalize(
    row: dict[str, Any], adapter: ColumnAdapter, purpose: Purpose, form: Form = "json"
) -> dict[str, str]:
    """One raw row as an ``Example`` row with its ``key`` and ``problem``. Of ranked answers, SFT
    takes the best.

    ``problem`` says why ``purpose`` cannot use the row, "" if it can.

    Rows with equal keys share their prompt (dialogues: their opening, up to the first answer) and
    must go to the same step. The key is the same for every purpose; it is "" if the row has no
    usable prompt.
    """
    raw, row = row, _as_meant(row, adapter, form)
    example, key, problem = Example(""), "", ""
    try:
        ranked = _ranked(row, adapter)
        prompt, answers = _read_row(row, adapter, ranked)
        prompt, inputs = _whole_prompt(row, adapter, purpose, prompt)
        example, key = Example(prompt, **inputs), _opening(prompt)
        if purpose == "rlhf":
            example.columns = {name: v for name, v in raw.items() if name != adapter.prompt}
        else:
            if adapter.label:
                answers = _by_label(answers[0], label_of(row, adapter))
            example = _answered(example, answers, ranked, purpose, adapter.label is not None)
    except Unusable as unusable:
        problem = str(unusable)
    plain = "plain" if is_plain(example.prompt) else ""
    return {**example.to_row(), "key": key, "problem": problem, "plain": plain}


def _as_meant(row: dict[str, Any], adapter: ColumnAdapter, form: Form) -> dict[str, Any]:
    """``row`` with the chats that CSV holds as JSON, and without the nulls that tables fill in."""
    if form == "json":
        return row
    meant = chat_in_cell if form == "csv" else without_nulls
    columns = {column.partition(".")[0] for column in (*adapter.columns, *CHAT_COLUMNS)}
    return {**row, **{column: meant(row[column]) for column in columns & row.keys()}}


def _because(content: Parsed) -> str:
    return f" ({content})" if isinstance(content, Unusable) else ""


def _is_answer(content: Parsed) -> TypeGuard[Content]:
    return bool(content) and not isinstance(content, Unusable)


def _ranked(row: dict[str, Any], adapter: ColumnAdapter) -> Union[Ranked, Unusable, None]:
    """The row's ranked answers; None if its data set has none."""
    if adapter.answers is None:
        return None
    values = look_up(row, adapter.scores or adapter.ranks)
    return read_ranked(look_up(row, adapter.answers), values, adapter.scores is not None)


def read_ranked(answers: Any, values: Any, higher_is_better: bool) -> Union[Ranked, Unusable]:
    """The answers of a row by rank; answers with equal values tie and keep their order.

    Args:
        answers, values: the row's lists, or their JSON, as in a CSV cell.
        higher_is_better: ``values`` are scores, not ranks.
    """
    answers, values = from_cell(answers), from_cell(values)
    for name, cell in (("answers", answers), ("ranks or scores", values)):
        if not isinstance(cell, list):
            return Unusable(f"no list of {name}")
    if len(answers) != len(values):
        return Unusable(f"{len(values)} ranks or scores for {len(answers)} answers")
    if len(answers) < 2:
        return Unusable("fewer than two answers to compare")
    numbers = [_number(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return Unusable("a rank or score that is not a number")
    numbers = [-number if higher_is_better else number for number in numbers]
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        return Unusable("answers that all tie")
    order = sorted(range(len(answers)), key=lambda i: numbers[i])
    return [answers[i] for i in order], [distinct.index(numbers[i]) for i in order]


def _number(value: Any) -> float:
    """A number, also from its text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _answered(
    example: Example,
    answers: list[Parsed],
    ranked: Union[Ranked, Unusable, None],
    purpose: Purpose,
    unpaired: bool,
) -> Example:
    """``example`` with a demonstration, a pair (``unpaired``: a side of it) or ranked answers.

    Raises:
        Unusable: an answer that ``purpose`` needs is missing or unreadable.
    """
    if isinstance(ranked, Unusable):
        raise Unusable(f"an unusable ranking ({ranked})")
    if ranked is not None and purpose == "reward":
        if unusable := [answer for answer in answers if not _is_answer(answer)]:
            raise Unusable("an empty or unreadable ranked answer" + _because(unusable[0]))
        best, *others, worst = filter(_is_answer, answers)
        ranks = [ranked[1][0], ranked[1][-1], *ranked[1][1:-1]]
        more: dict[str, Any] = {"others": others, "ranks": ranks} if others else {}
        return replace(example, chosen=best, rejected=worst, **more)
    chosen, rejected, demonstration = answers if ranked is None else (answers[0], None, None)
    if purpose == "sft":
        prompt, chosen = _demonstration(example.prompt, chosen, demonstration)
        example, rejected = replace(example, prompt=prompt), None
    if not _is_answer(chosen) and not (unpaired and _is_answer(rejected)):
        raise Unusable("an answer that is empty, unreadable or of weight 0" + _because(chosen))
    if purpose == "reward" and not unpaired and not _is_answer(rejected):
        raise Unusable("an empty or unreadable rejected answer" + _because(rejected))
    chosen, rejected = (answer if _is_answer(answer) else None for answer in (chosen, rejected))
    return replace(example, chosen=chosen, rejected=rejected)


def _by_label(answer: Parsed, label: Union[bool, str]) -> list[Parsed]:
    """Chosen, rejected and SFT's answer of a row with one answer and a label."""
    if label is False:
        return [Unusable("its label is false"), answer, None]
    if label is not True:
        answer = Unusable("a label that is neither true nor false; see --columns chosen")
    return [answer, None, None]


def _read_row(
    row: dict[str, Any], adapter: ColumnAdapter, ranked: Union[Ranked, Unusable, None]
) -> tuple[Parsed, list[Parsed]]:
    """The prompt; and chosen, rejected and SFT's answer, or the ranked answers. All text or all
    messages if usable.
    """
    if adapter.rewrite:
        row = {**row, **adapter.rewrite(row)}
    mask = from_cell(row.get("loss_mask"))
    read = read_dialogue if adapter.as_chat else read_content
    if adapter.messages:
        (chat,) = masked([from_cell(look_up(row, adapter.messages))], mask)
        prompt, answer = _split_answer(read(chat))
        return prompt, [answer, None, None]
    columns = (adapter.chosen, adapter.rejected, adapter.sft)
    found = [look_up(row, column) for column in columns]
    if isinstance(ranked, tuple):
        found = ranked[0]
    found = [_as_text(value) for value in found]
    asked = look_up(row, adapter.prompt)
    if adapter.prompt and adapter.chosen and not adapter.rejected:
        asked, found[0] = masked([asked, found[0]], mask)
    prompt, *answers = map(read, (asked, *found))
    if isinstance(prompt, Unusable):
        return prompt, [None] * len(answers)
    if adapter.prompt is None:
        prompts, parts = zip(*map(_split_answer, answers), strict=True)
        return _same_prompt(prompts, parts)
    turns = any(isinstance(answer, list) for answer in answers)
    if isinstance(prompt, str):
        prompt = _with_context(row, adapter, prompt)
        if prompt and (adapter.as_chat or turns):
            prompt = [{"role": "user", "content": prompt}]
    elif isinstance(asked, str):  # answers follow "Assistant:" and a space
        answers = [a.strip() if isinstance(a, str) else a for a in answers]
    if prompt is None and turns:
        prompt = []  # the dialogues may contain it
    if prompt and isinstance(prompt, list):
        if adapter.completion_alone and not isinstance(mask, list):
            prompt = [{**t, "weight": 0.0} if t["role"] == "assistant" else t for t in prompt]
        prompt = prompt if adapter.prompt in CHATS else begun(prompt)
    if not isinstance(prompt, list):
        return prompt, list(map(_filled, answers))
    prompts, parts = zip(*(_continued(prompt, answer) for answer in answers), strict=True)
    return _same_prompt((*prompts, prompt), parts)


def _as_text(answer: Any) -> Any:
    """A number or a boolean as text, as a chat template writes it; other values unchanged."""
    is_number = isinstance(answer, (bool, int, float)) and math.isfinite(answer)
    return str(answer) if is_number else answer


def _same_prompt(
    prompts: Sequence[Parsed], answers: Sequence[Parsed]
) -> tuple[Parsed, list[Parsed]]:
    """The first non-empty prompt and the answers; those to another prompt become unusable."""
    prompt = next((p for p in prompts if p), None)
    other = Unusable("it answers another prompt than the chosen one")
    pairs = zip(prompts, answers, strict=False)
    return prompt, [other if _is_answer(a) and p != prompt else a for p, a in pairs]


def _with_context(row: dict[str, Any], adapter: ColumnAdapter, prompt: str) -> Optional[str]:
    """A text prompt with the context of its row; None if it is blank."""
    if not prompt.strip():
        return None
    context = look_up(row, adapter.context)
    has_context = isinstance(context, str) and context.strip()
    return f"{prompt}\n\n{read_content(context)}" if has_context else prompt


def _whole_prompt(
    row: dict[str, Any], adapter: ColumnAdapter, purpose: Purpose, prompt: Parsed
) -> tuple[Content, dict[str, Any]]:
    """The prompt, a chat behind the system message and the history of its row; and what else its
    template gets.

    Raises:
        Unusable: there is none.
    """
    inputs: dict[str, Any] = {}
    if isinstance(prompt, list) and purpose == "rlhf":
        prompt = _asked(row, adapter, prompt)
    if isinstance(prompt, list) and prompt:
        try:
            prompt = _opening_turns(row, adapter, prompt) + prompt
            inputs["tools"] = read_tools(row.get("tools"), row.get("functions"))
            inputs["template_kwargs"] = read_template_kwargs(row.get("chat_template_kwargs"))
        except Unusable as unusable:
            prompt = unusable
    if isinstance(prompt, Unusable) or not prompt or not _opening(prompt):
        raise Unusable("no usable prompt" + _because(prompt))
    return prompt, inputs


def _asked(row: dict[str, Any], adapter: ColumnAdapter, prompt: list[Turn]) -> list[Turn]:
    """``prompt`` without the first turns of an answer of several, such as calls of tools."""
    answer = read_content(look_up(row, adapter.chosen)) if adapter.prompt else None
    if isinstance(answer, list) and answer[0]["role"] == "assistant" and BEGINS not in prompt[-1]:
        return prompt[: len(prompt) + 1 - len(answer)]
    return prompt


def _opening_turns(row: dict[str, Any], adapter: ColumnAdapter, prompt: list[Turn]) -> list[Turn]:
    """The system message and the ``history`` (Alpaca's, pairs) of a row.

    Raises:
        Unusable: a history in another form.
    """
    history, turns = from_cell(row.get("history")), []
    for pair in history if isinstance(history, list) and adapter.context else ():
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise Unusable("a history that is no list of pairs of texts")
        asked, said = map(storable, pair)
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and prompt[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": storable(system)})
    return turns


def _filled(answer: Parsed) -> Parsed:
    """An answer, None if it is a blank text."""
    return None if isinstance(answer, str) and not answer.strip() else answer


def _split_answer(dialogue: Parsed) -> tuple[Parsed, Parsed]:
    """A dialogue's prompt and last answer; if it ends with a user turn, all of it is the prompt."""
    if isinstance(dialogue, str):
        parts = split_text(dialogue)
        if not parts:
            why = "text in which no assistant speaks" if dialogue.strip() else "an empty dialogue"
            return Unusable(why), None
        return parts[0], _filled(parts[1])
    if isinstance(dialogue, list) and dialogue[-1]["role"] == "assistant":
        return _without_answer(dialogue)
    return dialogue, None


def _without_answer(dialogue: list[Turn]) -> tuple[list[Turn], Optional[list[Turn]]]:
    """The turns before the last one, and the last one by itself, None if it is not trained."""
    last = dialogue[-1]
    return dialogue[:-1], [last] if weight_of(last) else None


def _continued(prompt: list[Turn], answer: Parsed) -> tuple[Parsed, Parsed]:
    """Prompt and answer turn, where ``answer`` is text, further turns or a whole dialogue."""
    if isinstance(answer, list):
        if len(answer) > 1 and prompt and BEGINS in prompt[-1]:
            return prompt, Unusable("several turns behind a prompt that begins the answer")
        return _split_answer(prompt + answer if answer[0]["role"] == "assistant" else answer)
    filled = _filled(answer)
    if isinstance(filled, str):
        return prompt, [{"role": "assistant", "content": filled}]
    return prompt, filled


def _demonstration(
    prompt: Content, chosen: Parsed, demonstration: Parsed
) -> tuple[Content, Parsed]:
    """Prompt and answer for SFT: the demonstration, the chosen answer, or, of a dialogue that ends
    with a turn that is not trained, the last answer that is.
    """
    answer = demonstration if _is_answer(demonstration) else chosen
    if not answer and isinstance(prompt, list):
        ends = [i for i, turn in enumerate(prompt) if i and weight_of(turn)]
        if ends:
            return _without_answer(prompt[: ends[-1] + 1])
    return prompt, answer


def _opening(prompt: Content) -> str:
    """The text that identifies a prompt: all of it, or a dialogue up to its first answer."""
    if isinstance(prompt, str):
        return prompt.strip()
    answers = [i for i, turn in enumerate(prompt) if turn["role"] == "assistant" and i]
    turns = prompt[: answers[0]] if answers else prompt
    return "\n".join(turn["content"] for turn in turns).strip()
