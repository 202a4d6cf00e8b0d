"""Chat templates: rendered in the form that each reads, changed as a run asks, and what they write
after an answer.
"""

import json
import re
import traceback
from functools import lru_cache
from itertools import dropwhile, takewhile
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

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


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Turns, /, **inputs: Any) -> str:
    """``messages`` as text; contents and arguments of calls in the form that the template reads.

    Raises what the template raises.
    """
    template = inputs.get("chat_template") or tokenizer.chat_template
    form = _form(tokenizer, str(template))
    return _applied(tokenizer, [_formed(turn, *form) for turn in messages], **inputs)


def _applied(tokenizer: PreTrainedTokenizerBase, messages: Turns, /, **inputs: Any) -> str:
    if all(turn["content"] is not None for turn in messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, **inputs)
    # apply_chat_template leaves out what is null
    inputs = {**tokenizer.special_tokens_map, **inputs}
    template = tokenizer.get_chat_template(inputs.pop("chat_template", None), inputs.get("tools"))
    return render_jinja_template([messages], chat_template=template, **inputs)[0][0]


def attempt(tokenizer: PreTrainedTokenizerBase, messages: Turns, /, **inputs: Any) -> str:
    """`rendered`, or "" where the template raises: it is a program, and may raise anything."""
    try:
        return rendered(tokenizer, messages, **inputs)
    except Exception:
        return ""


@lru_cache(maxsize=16)
def _form(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[bool, bool, bool]:
    """Whether the template reads contents only as lists of parts (Idefics 3), arguments only as
    JSON text (DeepSeek V3), and calls only without content (R1's distilled models). ``template``
    tells templates apart.
    """

    def shows(turns: Turns) -> bool:
        try:
            return MARK in _applied(tokenizer, turns)
        except Exception:  # a template is a program: it may raise anything
            return False

    asked = {"role": "user", "content": MARK}
    as_parts = not shows([asked]) and shows([_formed(asked, True, False, False)])
    called = {"role": "assistant", "content": "", "tool_calls": [_call(0)]}
    for form in ((as_parts, False, False), (as_parts, True, False), (as_parts, True, True)):
        if shows([_formed(turn, *form) for turn in (_ASKED, called)]):
            return form
    return as_parts, False, False


def _formed(turn: dict[str, Any], as_parts: bool, as_json: bool, as_null: bool) -> dict[str, Any]:
    if as_null and turn.get("tool_calls") and not turn["content"]:
        turn = {**turn, "content": None}
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

    The first ends an answer: the first added token after its content, or one right behind it that
    ends a user's turn too (Cohere2). It comes from a dialogue's last turn: gpt-oss ends thoughts
    with a token that must not stop the answer after them. The second ends a turn with calls of
    tools (gpt-oss: <|call|>): the user's token, or else its last added one, unless it stands
    between two calls too. Where the template writes none, it is the token with which the next turn
    begins, a user's or a tool's (GLM-4.5). ``template`` tells templates apart.
    """
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    added -= {tokenizer.bos_token_id}

    def pieces(*turns: dict[str, Any]) -> list[list[int]]:
        """The added tokens, and -1 for others, between marks behind a question."""
        parts = attempt(tokenizer, [{**_ASKED, "content": MARK}, *turns]).split(MARK)[1:]
        encoded = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
        return [[i if i in added else -1 for i in ids] for ids in encoded]

    def next_turn(role: str, **answer: Any) -> list[int]:
        """The token that begins a turn behind an answer, if no answer begins with it."""
        said = {"role": "assistant", **answer}
        turn = {"role": role, "content": MARK, "name": "f", "tool_call_id": _call(0)["id"]}
        alone, followed = pieces(said), pieces(said, turn)
        if len(alone) < 2 or len(followed) <= len(alone):
            return []
        (asked, *_, last), after = alone, followed[-2]
        first = after[len(last) :][:1] if after[: len(last)] == last else []
        return [i for i in first if i not in (-1, *asked)]

    def chosen(ids: list[int]) -> int | None:
        return of_user if of_user in ids else next(iter(ids), None)

    asked, *after = pieces({"role": "assistant", "content": MARK}) or [[]]
    of_user = next((i for i in asked if i >= 0), None)
    ends = dropwhile(lambda i: i < 0, after[-1] if after else [])
    of_answer = [*takewhile(lambda i: i >= 0, ends)] or next_turn("user", content=MARK)
    calls = {"role": "assistant", "content": "", "tool_calls": [_call(0), _call(1)]}
    *between, last = pieces(calls)[1:] or [[]]
    of_calls = [i for i in reversed(last) if i >= 0 and not any(i in ids for ids in between)]
    of_calls = of_calls or next_turn("tool", content="", tool_calls=[_call(0)])
    return chosen(of_answer), chosen(of_calls)


def failure(error: Exception) -> str:
    """A template's error as one line with its line number: "line 3: TypeError: ..."."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)  # syntax errors have it
    kind = "" if isinstance(error, TemplateError) else type(error).__name__
    parts = (f"line {line}" if line else "", kind, str(error).strip().partition("\n")[0])
    return ": ".join(filter(None, parts))
