"""What the text of an example is to a model: segments, each tokenised by itself.

Comes in: prompts and answers (text or chat messages) and a tokenizer. Goes out: token ids, and
which of them are an assistant's. Must not know where examples come from or how long a sequence may
be.

Why segments: at generation the model reads the prompt's tokens and then writes its own. Tokenising
prompt + answer as one string could merge tokens across the seam, so that training would see prompts
that generation never does. So the prompt is tokenised the same way in both, and an answer apart
from it, special tokens off. In a dialogue each assistant turn is a segment: what rendering the chat
template with that turn adds to the rendering that asks for it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from dschat.config import UserError
from dschat.data.sources.adapters import Content, Example
from dschat.models.chat_template import default_template, failure

logger = logging.getLogger("dschat")


class RefusedChat(UserError):
    """A chat that the template refuses, by an exception of its own: its row is left out."""


@dataclass(frozen=True)
class Segment:
    """A piece of text that is tokenised by itself."""

    text: str
    is_answer: bool = False  # an assistant's turn
    add_special: bool = False  # let the tokenizer add its BOS: nothing in the text renders one


@dataclass
class Encoded:
    """An example as ids; ``problem`` says why it cannot be used ("" if it can)."""

    prompt_ids: list[int]  # (P,)
    prompt_targets: list[bool]  # (P,) tokens of earlier assistant turns, through their EOS
    answers: list[list[int]]  # each (A,), ends with its only EOS
    problem: str = ""


def prompt_text_ids(tokenizer: Any, prompt: Content) -> list[int]:
    """The ids of a prompt (text or messages) to be answered: the very ones training has.

    Raises:
        UserError: the tokenizer's chat template refuses these messages, or fails.
    """
    segments = prompt_segments(tokenizer, prompt)
    return [token for ids in encode(tokenizer, segments) for token in ids]


def encode_examples(
    tokenizer: Any, examples: Sequence[Example], fields: Sequence[str]
) -> list[Encoded]:
    """Tokenise prompts and the answers in ``fields`` ("chosen", "rejected"), all in one go.

    Raises:
        UserError: the tokenizer has no EOS, or its chat template fails.
    """
    eos = require_eos(tokenizer)
    split: list[list[Segment]] = []
    problems = []
    for example in examples:
        try:
            segments = prompt_segments(tokenizer, example.prompt)
            for name in fields:
                segments.append(answer_segment(tokenizer, example.prompt, getattr(example, name)))
            problem = ""
        except RefusedChat as error:
            segments, problem = [], str(error)
        split.append(segments)
        problems.append(problem)
    ids = iter(encode(tokenizer, [segment for segments in split for segment in segments]))
    return [
        Encoded([], [], [], problem)
        if problem
        else _assemble([(s, next(ids)) for s in segments], len(fields), eos)
        for segments, problem in zip(split, problems, strict=True)
    ]


def prompt_segments(tokenizer: Any, prompt: Content) -> list[Segment]:
    """A prompt's segments: earlier assistant turns, and what the template puts between them."""
    if isinstance(prompt, str):
        return [Segment(prompt, add_special=True)]
    pieces, done = [], ""
    for i, turn in enumerate(prompt):
        if turn["role"] == "assistant" and i:
            asked = render_chat(tokenizer, prompt[:i], ask=True)
            answered = render_chat(tokenizer, prompt[: i + 1], ask=False)
            pieces += [(asked, done, False), (answered, asked, True)]
            done = answered
    pieces.append((render_chat(tokenizer, prompt, ask=True), done, False))
    if not all(text.startswith(before) for text, before, _ in pieces):
        _warn_once(
            "the chat template rewrites earlier turns of a dialogue when it goes on: "
            "only last answers are trained"
        )
        pieces = [(pieces[-1][0], "", False)]
    return [Segment(text[len(before) :], is_answer) for text, before, is_answer in pieces]


def answer_segment(tokenizer: Any, prompt: Content, answer: Content) -> Segment:
    """The answer's segment: its text, or what the template adds to the prompt for it."""
    if isinstance(answer, str):
        return Segment(answer, is_answer=True)
    asked = render_chat(tokenizer, prompt, ask=True)
    answered = render_chat(tokenizer, [*prompt, *answer], ask=False)
    if answered.startswith(asked):
        return Segment(answered[len(asked) :], is_answer=True)
    _warn_once(
        "the chat template renders an answer otherwise than it asks for one: "
        "answers stand as they are"
    )
    return Segment(answer[-1]["content"], is_answer=True)


def encode(tokenizer: Any, segments: Sequence[Segment]) -> list[list[int]]:
    """Token ids of each segment; an EOS that the tokenizer adds to a prompt is taken off again."""
    out: list[list[int]] = [[] for _ in segments]
    for special in (False, True):
        where = [i for i, s in enumerate(segments) if s.add_special == special and s.text]
        if not where:
            continue
        texts = [segments[i].text for i in where]
        # verbose off: that a text is longer than the model's limit is ours to handle, and handled
        batch = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        for i, ids in zip(where, batch, strict=True):
            out[i] = list(ids)
            ends = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
            if special and ends and not segments[i].text.endswith(tokenizer.eos_token):
                out[i].pop()
    return out


def require_eos(tokenizer: Any) -> int:
    """The id of EOS; without one no answer could end.

    Raises:
        UserError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no EOS token, so no answer could end; set eos_token in its "
            "tokenizer_config.json, or choose another --tokenizer_name_or_path"
        )
    return tokenizer.eos_token_id


def _assemble(pieces: list[tuple[Segment, list[int]]], num_answers: int, eos: int) -> Encoded:
    prompt_ids: list[int] = []
    targets: list[bool] = []
    for segment, ids in pieces[: len(pieces) - num_answers]:
        # what a template renders behind an answer's EOS (a line break) is not the assistant's
        num_targets = len(_through_eos(ids, eos)) if segment.is_answer else 0
        prompt_ids += ids
        targets += [i < num_targets for i in range(len(ids))]
    if not prompt_ids:
        return Encoded([], [], [], "a prompt without tokens")
    answers = [_through_eos(ids, eos) for _, ids in pieces[len(pieces) - num_answers :]]
    answers = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in answers]
    if any(len(ids) < 2 for ids in answers):
        return Encoded([], [], [], "an answer without tokens")
    return Encoded(prompt_ids, targets, answers)


def _through_eos(ids: list[int], eos: int) -> list[int]:
    """``ids`` up to and with the first EOS; all of them if there is none."""
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def render_chat(
    tokenizer: Any, messages: list[dict[str, str]], ask: bool, template: str | None = None
) -> str:
    """The template's text of ``messages``; with ``ask``, up to the assistant's next words.

    It brings all special tokens along: tokenise it without adding any. ``template`` stands in for
    the tokenizer's own.

    Raises:
        RefusedChat: the tokenizer's chat template refuses these messages.
        UserError: it fails.
    """
    if template is None and not tokenizer.chat_template:
        template = default_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=ask
        )
    except (TemplateError, ValueError) as error:  # ValueError: named templates, none the default
        raise RefusedChat(f"a chat that the tokenizer's template refuses ({error})") from error
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            f"the tokenizer's chat template fails ({failure(error)}) on the chat that ends with "
            f"{messages[-1]['content'][-40:]!r}; fix the template"
        ) from error


@lru_cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
