"""Renders chats by a tokenizer's template: prompts, what an answer adds to them, and thoughts.

A thought is a field of the turn (`turns.THOUGHTS`), or a ``<think>`` block in front of its content.
"""

import re
from os.path import commonprefix
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import THOUGHTS, Turn
from dschat.models.chat_template import MARK, attempt, default_template, failure, rendered
from dschat.models.tokenizer import stop_ids

# The first tag may be a part of the prompt.
THINK = re.compile(r"\s*(?:<think>)?\s*((?:(?!<think>).)*?)\s*</think>\s*", re.DOTALL)
LAST_TAG = re.compile(r"([<\[][^<>\[\]\s]+[>\]])(\s*)\Z")


class RefusedChat(UserError):
    """A chat for which the template calls ``raise_exception``: its row is dropped."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Turn],
    add_generation_prompt: bool = False,
    **inputs: Any,
) -> str:
    """``messages`` as text, rendered by the tokenizer's chat template or else the default one.

    The text has all special tokens: tokenize it without adding any.

    Raises:
        RefusedChat: the chat template refuses these messages.
        UserError: the chat template fails.
    """
    template = None if tokenizer.chat_template else default_template(tokenizer)
    try:
        return rendered(
            tokenizer,
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **inputs,
        )
    except (TemplateError, ValueError) as error:  # ValueError: named templates without a default
        raise RefusedChat(f"a chat that the tokenizer's template refuses ({error})") from error
    except Exception as error:  # a template is a program: it may raise any exception
        raise UserError(
            f"the tokenizer's chat template fails ({failure(error)}) on the chat that ends with "
            f"{messages[-1]['content'][-40:]!r}; fix the template"
        ) from error


def continuing(asked: str, answered: str, closes: bool = True) -> str:
    """What follows ``asked``, without a tag such as <think> that ``asked`` has opened already.

    ``closes``: behind the end of an opened thought, if the answer has none.
    """
    answer, opened = answered[len(asked) :], LAST_TAG.search(asked)
    if opened and answer.lstrip().startswith(opened[1]):
        answer = answer.lstrip().removeprefix(opened[1]).removeprefix(opened[2])
    if closes and opened and opened[1] == "<think>" and "</think>" not in answer:
        answer = f"</think>\n\n{answer}"
    return answer


# -- thoughts --------------------------------------------------------------------------------------


def thought_of(turn: Turn) -> str:
    """A turn's thought, "" without one."""
    found = THINK.match(turn["content"])
    return turn.get(THOUGHTS[0], "").strip() or (found[1] if found else "")


def resolved(tokenizer: PreTrainedTokenizerBase, reasoning: str) -> str:
    """``--reasoning`` for a tokenizer: "field" where its template renders the field, unless another
    way is asked for; "auto" is "inline" where it reads only the tag.
    """
    if reasoning in ("auto", "keep") and _shows(tokenizer):
        return "field"
    if reasoning == "auto":
        return "inline" if "</think>" in str(tokenizer.chat_template) else "keep"
    return reasoning


def with_reasoning(content: Content, how: str) -> Content:
    """A chat with its thoughts as fields, in front of the content ("inline"), dropped or kept."""
    if isinstance(content, str) or how == "keep":
        return content
    return [_changed(turn, how) if turn["role"] == "assistant" else turn for turn in content]


def _changed(turn: Turn, how: str) -> Turn:
    thought, is_field = thought_of(turn), THOUGHTS[0] in turn
    if not thought or (how == "inline" and not is_field) or (how == "field" and is_field):
        return turn
    said = THINK.sub("", turn["content"], count=1)
    if how == "field":
        return {**turn, **dict.fromkeys(THOUGHTS, thought), "content": said}
    block = f"<think>\n{thought}\n</think>\n\n" if how == "inline" else ""
    return {k: v for k, v in turn.items() if k not in THOUGHTS} | {"content": block + said}


def _shows(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template renders a last answer's thought."""
    answer = {"role": "assistant", "content": "answer", **dict.fromkeys(THOUGHTS, MARK)}
    return MARK in attempt(tokenizer, [{"role": "user", "content": "?"}, answer])


# -- parts of a chat -------------------------------------------------------------------------------


def begun_text(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Turn], inputs: dict[str, Any]
) -> str:
    """A chat whose last turn is the beginning of the answer, and stays open."""
    try:
        return render_chat(tokenizer, prompt, continue_final_message=True, **inputs)
    except RefusedChat:
        raise RefusedChat(
            "the beginning of an answer, which the chat template does not render"
        ) from None


def rest_text(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Turn], answer: Turn, inputs: dict[str, Any]
) -> tuple[str, str]:
    """`begun_text`, and the text of the answer that continues it."""
    asked = begun_text(tokenizer, prompt, inputs)
    whole = {**prompt[-1], **answer, "content": prompt[-1]["content"] + answer["content"]}
    answered = attempt(tokenizer, [*prompt[:-1], whole], **inputs)
    if not answered.startswith(asked):  # the thought of the whole turn is rendered in another way
        if "tool_calls" in answer or THOUGHTS[0] in answer:
            raise RefusedChat("calls or thoughts in an answer that its prompt begins")
        answered = asked + answer["content"]
    return asked, continuing(asked, answered, closes=False)


def through_last_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: Content, whole: str, inputs: dict[str, Any]
) -> str:
    """What ``whole``, the rendered prompt, has up to the end of its last answer."""
    assert not isinstance(prompt, str)
    last = max((i for i, t in enumerate(prompt) if i and t["role"] == "assistant"), default=0)
    if not last:
        return ""
    marked = [*prompt[:last], {"role": "assistant", "content": "\ue000"}, *prompt[last + 1 :]]
    other = attempt(tokenizer, marked, add_generation_prompt=True, **inputs)
    behind = len(whole) - len(commonprefix([whole[::-1], other[::-1]]))
    ends = [tokenizer.decode(i) for i in stop_ids(tokenizer)]
    found = [at + len(end) for end in ends if (at := whole.find(end, behind)) >= 0]
    return whole[: min(found, default=behind)]
