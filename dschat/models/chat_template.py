"""Supplies a chat template for tokenizers without one; describes errors in a template."""

import traceback
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

# Every message is rendered independently. Each answer ends with EOS.
_TURNS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '\\n\\nHuman: ' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '\\n\\nAssistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ '\\n\\nSystem: ' + m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
_MARK = "an-answer"  # no template has it


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Human and Assistant turns, with a leading BOS if this tokenizer adds one to text.

    Rendered chats are tokenized with ``add_special_tokens=False``, also by other programs that load
    the saved template, so the template itself must contain the BOS.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = bos is not None and len(ids) > 1 and ids[0] == bos
    return ("{{ bos_token }}" if starts_with_bos else "") + _TURNS


@lru_cache(maxsize=16)
def turn_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[int | None, int | None]:
    """The ids with which the tokenizer's template ends an assistant's turn; None: it writes none.

    The first ends an answer: the first added token after its content. It comes from a dialogue's
    last turn: gpt-oss ends thoughts with a token that must not stop the answer after them. The
    second ends a turn with calls of tools (gpt-oss: <|call|>): its last added token, unless it
    stands between two calls too. ``template`` tells templates apart.
    """
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}

    def after_marks(**answer: Any) -> list[list[int]]:
        """The added tokens after each mark in a rendered turn."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", **answer}]
        try:
            parts = tokenizer.apply_chat_template(turns, tokenize=False).split(_MARK)[1:]
        except Exception:  # a template is a program: it may raise anything
            parts = []
        encoded = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
        return [[i for i in ids if i in added] for ids in encoded] or [[]]

    function = {"name": "f", "arguments": {"x": _MARK}}
    calls = [{"type": "function", "id": f"call{i:05d}", "function": function} for i in range(2)]
    *between, last = after_marks(content="", tool_calls=calls)
    of_calls = [i for i in last if not any(i in ids for ids in between)]
    of_answer = after_marks(content=_MARK)[-1]
    return next(iter(of_answer), None), next(reversed(of_calls), None)


def failure(error: Exception) -> str:
    """A template's error as one line with its line number: "line 3: TypeError: ..."."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)  # syntax errors have it
    kind = "" if isinstance(error, TemplateError) else type(error).__name__
    parts = (f"line {line}" if line else "", kind, str(error).strip().partition("\n")[0])
    return ": ".join(filter(None, parts))
