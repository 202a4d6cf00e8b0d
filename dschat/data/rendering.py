"""Renders chats by a tokenizer's template: prompts, what an answer adds to them, and thoughts.

A thought is a field of the turn (`turns.THOUGHTS`), or a ``<think>`` block in front of its content.
"""

import logging
import re
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import BEGINS, THOUGHTS, Turn, storable
from dschat.models.chat_template import MARK, attempt, default_template, failure, rendered
from dschat.models.tokenizer import stop_ids

logger = logging.getLogger("dschat")

# What a template may leave out of an answer.
_LOST = ", which the chat template does not render"
THOUGHT = f"thoughts ({THOUGHTS[0]}){_LOST}; see --reasoning"
CALLS, TEXT = f"calls of tools{_LOST}", f"text beside calls of tools{_LOST}"
_RULED_OUT = (
    "thoughts, which the generation prompt rules out; set the chat template's variable for them, "
    "such as --chat_template_kwargs '{\"enable_thinking\": true}', or see --reasoning"
)
_MARKED_THOUGHT, _END = f"{MARK}-thought", "</think>"
# The first tag may be a part of the prompt.
THINK = re.compile(  # NOTE: linear in the text, which a client may have sent
    r"\s*(?!\s)(?:<think>\s*(?!\s))?((?:(?:(?!</?think>).)*?\S)??)\s*</think>\s*", re.DOTALL
)
LAST_TAG = re.compile(r"([<\[][^<>\[\]\s]+[>\]])(\s*)\Z")


class RefusedChat(UserError):
    """A chat for which the template calls ``raise_exception``: its row is dropped."""


class LeftOut(RefusedChat):
    """An answer that the template does not render as it is."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Turn],
    /,
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
        text = rendered(
            tokenizer,
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **inputs,
        )
        return storable(text)  # calls and tools may have half a character
    except (TemplateError, ValueError) as error:  # ValueError: named templates without a default
        raise RefusedChat(f"a chat that the tokenizer's template refuses ({error})") from error
    except Exception as error:  # a template is a program: it may raise any exception
        raise UserError(
            f"the tokenizer's chat template fails ({failure(error)}) on the chat that ends with "
            f"{messages[-1]['content'][-40:]!r}; fix the template"
        ) from error


def rendered_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[Turn],
    turn: Turn,
    closes: bool = True,
    /,
    **inputs: Any,
) -> tuple[str, str]:
    """The generation prompt, and what the template adds to it for an answer.

    ``closes``: the answer is one for this prompt, and ends a thought that it opens; else it may be
    any text.

    Raises:
        RefusedChat: the template refuses the chat, or leaves calls of tools out.
        LeftOut: it leaves another part out, or the answer cannot follow this prompt.
    """
    if BEGINS in prompt[-1]:
        return _rendered_rest(tokenizer, prompt, turn, inputs)
    asked = render_chat(tokenizer, prompt, add_generation_prompt=True, **inputs)
    (thought, said), content = _parts(turn), turn["content"]
    inline = None if THOUGHTS[0] in turn else THINK.match(content)
    if closes and thought and asked.rstrip().endswith(_END):
        raise LeftOut(_RULED_OUT)
    marked, marks = _marked(turn)
    text = render_chat(tokenizer, [*prompt, marked], **inputs) if marks else ""
    lost = {marks[mark] for mark in marks if mark not in text}
    if lost - ({THOUGHT} if inline else set()):
        raise (RefusedChat if CALLS in lost else LeftOut)(min(lost))
    # a template may cut a thought off, as from earlier turns, with all that is before it
    hidden = content.lstrip() if lost else said if _END in said else ""
    shown = MARK if lost else content.removesuffix(hidden) + MARK * bool(hidden)
    answered = render_chat(tokenizer, [*prompt, {**turn, "content": shown}], **inputs)
    begin = len(asked)
    if not answered.startswith(asked):
        # it rewrites earlier turns when an answer follows, as gpt-oss's, but not the last one; or
        # the answer has no tag that the prompt opens
        earlier = attempt(tokenizer, prompt[:-1], **inputs)
        added = LAST_TAG.sub("", asked[len(commonprefix([asked, earlier])) :])
        begin = answered.rindex(added) + len(added) if added and added in answered else -1
    if begin < 0:
        if turn.get("tool_calls") or (thought and not inline):
            raise LeftOut(min(marks.values()))
        _warn_once(
            "the chat template does not render an answer as a continuation of its generation "
            "prompt: such answers are trained as plain text"
        )
        begin, answered = 0, shown
    answer = answered[begin:].replace(MARK, hidden or MARK)
    if lost and inline and hidden not in answer:
        answer = hidden + answer
    return asked, _continuing(asked, answer, said, closes)


def _continuing(asked: str, answer: str, said: str, closes: bool) -> str:
    """``answer`` without a tag such as <think> that ``asked`` has opened already.

    ``closes``: behind the end of an opened thought, if there is none but those in ``said``.
    """
    opened = LAST_TAG.search(asked)
    if opened and answer.lstrip().startswith(opened[1]):
        answer = answer.lstrip().removeprefix(opened[1]).removeprefix(opened[2])
    is_open = closes and opened and opened[1] == "<think>"
    if is_open and answer.count(_END) <= said.count(_END):
        answer = f"{_END}\n\n{answer}"
    return answer


def _marked(turn: Turn) -> tuple[Turn, dict[str, str]]:
    """``turn`` with marks in place of its thought, its calls and the text beside them, and what it
    means that one is left out. A thought, or a tool's name, may stand in the answer's text too.
    """
    (thought, said), content = _parts(turn), turn["content"]
    marked, marks = dict(turn), {_MARKED_THOUGHT: THOUGHT} if thought else {}
    if marks and THOUGHTS[0] in turn:
        marked |= dict.fromkeys(THOUGHTS, _MARKED_THOUGHT)
    elif marks and (found := THINK.match(content)):
        marked["content"] = content[: found.start(1)] + _MARKED_THOUGHT + content[found.end(1) :]
    calls = []
    for i, call in enumerate(turn.get("tool_calls", ())):
        name, keys = f"{MARK}-name{i}", range(len(call["function"]["arguments"]))
        arguments = {f"{name}-key{j}-": f"{name}-value{j}-" for j in keys}
        calls.append({**call, "function": {"name": f"{name}.", "arguments": arguments}})
        marks |= dict.fromkeys([f"{name}.", *arguments, *arguments.values()], CALLS)
    if calls:
        marked["tool_calls"] = calls
        if said.strip():
            marked["content"] = marked["content"].removesuffix(said) + f"{MARK}-text"
            marks[f"{MARK}-text"] = TEXT
    return marked, marks


# -- thoughts --------------------------------------------------------------------------------------


def _parts(turn: Turn) -> tuple[str, str]:
    """A turn's thought, "" without one, and its content without the thought in front of it."""
    found = THINK.match(turn["content"])
    thought = turn.get(THOUGHTS[0], "").strip() or (found[1] if found else "")
    return thought, turn["content"][found.end() :] if found else turn["content"]


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
    (thought, said), is_field = _parts(turn), THOUGHTS[0] in turn
    if not thought or (how == "inline" and not is_field) or (how == "field" and is_field):
        return turn
    if how == "field":
        return {**turn, **dict.fromkeys(THOUGHTS, thought), "content": said}
    while how == "drop" and (found := THINK.match(said)):
        said = said[found.end() :]
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


def _rendered_rest(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Turn], answer: Turn, inputs: dict[str, Any]
) -> tuple[str, str]:
    """`rendered_answer` of the answer that continues `begun_text`."""
    asked = begun_text(tokenizer, prompt, inputs)
    whole = {**prompt[-1], **answer, "content": prompt[-1]["content"] + answer["content"]}
    answered = attempt(tokenizer, [*prompt[:-1], whole], **inputs)
    is_rest = answered.startswith(asked)
    if "tool_calls" in answer or THOUGHTS[0] in answer:
        marked, marks = _marked(whole)
        text = attempt(tokenizer, [*prompt[:-1], marked], **inputs)
        if not (is_rest and all(mark in text for mark in marks)):
            raise RefusedChat("calls or thoughts in an answer that its prompt begins")
    if not is_rest:  # the thought of the whole turn is rendered in another way
        answered = asked + answer["content"]
    return asked, answered[len(asked) :]


def through_last_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Turn], whole: str, inputs: dict[str, Any]
) -> str:
    """What ``whole``, the rendered prompt, has up to the end of its last answer; all of it where
    the template changes the text of a turn after that.
    """
    # The generation prompt may have the text of a turn: "assistant" has "a".
    at = len(commonprefix([whole, attempt(tokenizer, prompt, **inputs)]))
    for turn in reversed(prompt[1:]):
        if turn["role"] == "assistant":
            break
        at = whole.rfind(turn["content"].strip(), 0, at)
        if at < 0:
            return whole
    else:
        return ""
    ends = [tokenizer.decode(i) for i in stop_ids(tokenizer)]
    found = [start + len(end) for end in ends if (start := whole.rfind(end, 0, at)) >= 0]
    return whole[: max(found, default=at)]


@lru_cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
