"""Chat templates that show tools, in the forms of families of models, and tokenizers with them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

_HEAD = (
    "{% if tools %}{{ '<im>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<eot>\\n' }}{% endif %}"
)
_ASK = "{% if add_generation_prompt %}{{ '<im>assistant\\n' }}{% endif %}"
# Hermes and Qwen2.5: calls in tags, results as a user's turn
HERMES = (
    _HEAD + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<im>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><eot>\\n' }}{% else %}"
    "{{ '<im>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<eot>\\n' }}{% endif %}{% endfor %}" + _ASK
)
# Llama 3.1: an answer that is JSON, one call in an answer, results as JSON
JSON = (
    _HEAD + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}{{ '<im>assistant\\n' + "
    "{'name': f.name, 'parameters': f.arguments} | tojson + '<eot>\\n' }}"
    "{% elif m.role == 'tool' %}{{ '<im>ipython\\n' + m.content | tojson + '<eot>\\n' }}{% else %}"
    "{{ '<im>' + m.role + '\\n' + m.content + '<eot>\\n' }}{% endif %}{% endfor %}" + _ASK
)
# Mistral: a list after a mark; a result needs the number of its call
MARKED = (
    "{% if tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[RESULT] ' + {'content': m.content, 'call_id': "
    "m.tool_call_id} | tojson + '[/RESULT]' }}{% elif m.tool_calls %}{{ '[CALLS] [' }}"
    "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments, "
    "'id': c.id} | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ']<eot>' }}"
    "{% else %}{{ ' ' + m.content + '<eot>' }}{% endif %}{% endfor %}"
)
# Qwen3.5: names and arguments in tags, numbers, booleans and null as Python writes them
TAGS = (
    _HEAD + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<im>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><eot>\\n' }}{% else %}"
    "{{ '<im>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\\n' + "
    "(v | tojson if v is iterable and v is not string else v | string) + '\\n</parameter>\\n' }}"
    "{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<eot>\\n' }}{% endif %}{% endfor %}" + _ASK
)
REAL = Path(__file__).parent / "data/chat_templates"  # of models, as TRL 1.16 has them (Apache 2.0)
FORMS = {"hermes": HERMES, "json": JSON, "marked": MARKED, "tags": TAGS}


def opening(template):
    """``template``, whose generation prompt opens a thought."""
    *before, ask = template.rpartition("'<im>assistant\\n'")
    return "".join([*before[:-1], "'<im>assistant\\n<think>\\n'", ask])


def tokenizer_of(template, eos="<eot>", special=("<im>", "[CALLS]"), **options):
    """A byte-level tokenizer, so that any text survives; pairs of letters are tokens too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "aeiou" for b in "rstlnm"]
    vocabulary = [*alphabet, *(a + b for a, b in pairs)]
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(vocabulary)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(dict.fromkeys([eos, *special])))
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=eos,
        pad_token=eos,
        chat_template=template,
        **options,
    )


def search(query: str, limit: int = 3) -> list[str]:
    """Searches.

    Args:
        query: What to look for.
        limit: How many to return.
    """
    return [query] * limit


SCHEMAS = [get_json_schema(search)]
