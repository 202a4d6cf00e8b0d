"""The chat template of tokenizers that have none.

Comes in: a tokenizer. Goes out: a Jinja template, as ``tokenizer.chat_template`` takes it. It must
not know messages, models or training.
"""

from typing import Any

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
