"""Renders chats by a tokenizer's template, and says what an answer adds to its prompt's text."""

import re
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.sources.turns import Turn
from dschat.models.chat_template import default_template, failure, rendered

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
