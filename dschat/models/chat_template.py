"""The chat template of tokenizers that have none; and where one that has failed did so.

Comes in: a tokenizer. Goes out: a Jinja template, as ``tokenizer.chat_template`` takes it. It must
not know messages, models or training.
"""

import traceback
from typing import Any

from jinja2.exceptions import TemplateError

# Each message is rendered by itself. Earlier answers keep the EOS they were written with.
_TURNS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '\\n\\nHuman: ' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '\\n\\nAssistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ '\\n\\nSystem: ' + m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)


def default_template(tokenizer: Any) -> str:
    """Turns of Human and Assistant; with the BOS that this tokenizer puts before any text.

    A rendered chat is tokenised without special tokens of the tokenizer's own, by us and by others
    who find the template in a saved folder: so the BOS must be in it.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = bos is not None and len(ids) > 1 and ids[0] == bos
    return ("{{ bos_token }}" if starts_with_bos else "") + _TURNS


def failure(error: Exception) -> str:
    """What a template raised, and in which of its lines: "line 3: TypeError: ...".

    Jinja's frames have the template's line numbers.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)  # of wrong syntax
    kind = "" if isinstance(error, TemplateError) else type(error).__name__
    parts = (f"line {line}" if line else "", kind, str(error).strip().partition("\n")[0])
    return ": ".join(filter(None, parts))
