"""Chat templates: rendered in the form that each reads, changed as a run asks, and what they write
after an answer.
"""

import json
import re
import traceback
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.data import template_variables

# Every message is rendered independently. Each answer ends with EOS.
_TURNS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '\\n\\nHuman: ' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '\\n\\nAssistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ '\\n\\nSystem: ' + m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
MARK = "a-mark"  # no template has it
# Put in front of a template, so that every program that loads the tokenizer renders alike.
MERGE_SYSTEM = (
    "{% if messages|length > 1 and messages[0]['role'] == 'system' "
    "and messages[1]['role'] == 'user' and messages[1]['content'] is string %}"
    "{% set messages = [{'role': 'user', 'content': "
    "messages[0]['content'] + '\\n\\n' + messages[1]['content']}] + messages[2:] %}"
    "{% endif %}"
)
_PREFIX = re.compile(
    rf"(?:{re.escape(MERGE_SYSTEM)}|{{% set (\w+) = \1 if \1 is defined else .*? %}})*", re.DOTALL
)


Turns = list[dict[str, Any]]
_ASKED = {"role": "user", "content": "?"}


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Turns, **inputs: Any) -> str:
    """``messages`` as text; contents and arguments of calls in the form that the template reads.

    Raises what the template raises.
    """
    template = inputs.get("chat_template") or tokenizer.chat_template
    as_parts, as_json = _form(tokenizer, str(template))
    if as_parts or as_json:
        messages = [_formed(turn, as_parts, as_json) for turn in messages]
    return tokenizer.apply_chat_template(messages, tokenize=False, **inputs)


def attempt(tokenizer: PreTrainedTokenizerBase, messages: Turns, **inputs: Any) -> str:
    """`rendered`, or "" where the template raises: it is a program, and may raise anything."""
    try:
        return rendered(tokenizer, messages, **inputs)
    except Exception:
        return ""


@lru_cache(maxsize=16)
def _form(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[bool, bool]:
    """Whether the template reads contents only as lists of parts (Idefics 3), and arguments only as
    JSON text (DeepSeek V3). ``template`` tells templates apart.
    """

    def shows(turns: Turns) -> bool:
        try:
            return MARK in tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template is a program: it may raise anything
            return False

    asked = {"role": "user", "content": MARK}
    as_parts = not shows([asked]) and shows([_formed(asked, True, False)])
    called = {"role": "assistant", "content": "", "tool_calls": [_call(0)]}
    turns = [
        [_formed(turn, as_parts, as_json) for turn in (_ASKED, called)] for as_json in (False, True)
    ]
    return as_parts, not shows(turns[0]) and shows(turns[1])


def _formed(turn: dict[str, Any], as_parts: bool, as_json: bool) -> dict[str, Any]:
    if as_parts and isinstance(turn["content"], str):
        turn = {**turn, "content": [{"type": "text", "text": turn["content"]}]}
    if as_json and turn.get("tool_calls"):
        functions = [call["function"] for call in turn["tool_calls"]]
        texts = [json.dumps(f["arguments"], ensure_ascii=False) for f in functions]
        calls = zip(turn["tool_calls"], functions, texts, strict=True)
        made = [{**call, "function": {**f, "arguments": text}} for call, f, text in calls]
        turn = {**turn, "tool_calls": made}
    return turn


def _call(number: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"x": MARK}}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def set_template_defaults(tokenizer: PreTrainedTokenizerBase, values: dict[str, Any]) -> None:
    """Give variables of the tokenizer's chat template other defaults: they are saved with it.

    Raises:
        UserError: the template does not read one of them.
    """
    defaults = ""
    for name, value in template_variables(values).items():
        if not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            raise UserError(
                f"chat_template_kwargs: the chat template reads no {name:.40}; check the name"
            )
        defaults += f"{{% set {name} = {name} if {name} is defined else {value!r} %}}"
    tokenizer.chat_template = _prefixed(tokenizer.chat_template, defaults)


def merge_system(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a template that refuses or ignores a system message put it in front of the first user
    turn; others stay as they are.
    """
    turns, plain = [{"role": "system", "content": MARK}, _ASKED], tokenizer.chat_template
    if MARK not in attempt(tokenizer, turns):
        tokenizer.chat_template = _prefixed(plain, MERGE_SYSTEM)
        if MARK not in attempt(tokenizer, turns):
            tokenizer.chat_template = plain


def bare_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's template without what `complete_tokenizer` put in front of it."""
    return _PREFIX.sub("", str(tokenizer.chat_template), count=1)


def merges_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template puts a system message in front of the first user turn."""
    return MERGE_SYSTEM in str(tokenizer.chat_template)


def _prefixed(template: Any, text: str) -> Any:
    """``template``, or each of named ones, behind ``text``; unchanged where it begins with it."""
    if isinstance(template, dict):
        return {name: _prefixed(each, text) for name, each in template.items()}
    return template if template.startswith(text) else text + template


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
        turns = [_ASKED, {"role": "assistant", **answer}]
        parts = attempt(tokenizer, turns).split(MARK)[1:]
        encoded = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
        return [[i for i in ids if i in added] for ids in encoded] or [[]]

    *between, last = after_marks(content="", tool_calls=[_call(0), _call(1)])
    of_calls = [i for i in last if not any(i in ids for ids in between)]
    of_answer = after_marks(content=MARK)[-1]
    return next(iter(of_answer), None), next(reversed(of_calls), None)


def failure(error: Exception) -> str:
    """A template's error as one line with its line number: "line 3: TypeError: ..."."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)  # syntax errors have it
    kind = "" if isinstance(error, TemplateError) else type(error).__name__
    parts = (f"line {line}" if line else "", kind, str(error).strip().partition("\n")[0])
    return ": ".join(filter(None, parts))
