"""Supplies a chat template for tokenizers without one; describes errors in a template."""

import traceback

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


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Human and Assistant turns, with a leading BOS if this tokenizer adds one to text.

    Rendered chats are tokenized with ``add_special_tokens=False``, also by other programs that load
    the saved template, so the template itself must contain the BOS.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = bos is not None and len(ids) > 1 and ids[0] == bos
    return ("{{ bos_token }}" if starts_with_bos else "") + _TURNS


def failure(error: Exception) -> str:
    """A template's error as one line with its line number: "line 3: TypeError: ..."."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)  # syntax errors have it
    kind = "" if isinstance(error, TemplateError) else type(error).__name__
    parts = (f"line {line}" if line else "", kind, str(error).strip().partition("\n")[0])
    return ": ".join(filter(None, parts))
