"""Builds ``builtin/tiny``: a Llama of half a million random weights and its tokenizer.

The result is an ordinary Hugging Face folder, built once into the user's cache. The tokenizer is
trained on the built-in rows.

torch and transformers are imported only to build the folder: other model names cost nothing.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dschat.builtin.chat_rows import builtin_rows
from dschat.config import UserError
from dschat.distributed.machine import is_full, needed_and_free, writable_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TINY_NAME = "builtin/tiny"

END, PAD, USER, ASSISTANT, SYSTEM = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)  # ids 0 to 4
MAX_VOCAB_SIZE = 1024

# Each message is rendered independently: a rendered prefix of a conversation is a prefix of the
# rendered conversation. Of tools it shows the names; a tool's result is a user's turn.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>tools:' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'].replace('tool', 'user') + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The smallest model that learns the built-in tasks: two layers can copy and look up, and decode
# twice as fast as four. With initializer_range 0.02, five epochs of SFT reach half the gold score.
TINY_CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}

_NUM_BYTES = 9 << 18  # approximate size of the folder: half a million fp32 weights, the tokenizer

# A word keeps its leading space; every digit is a separate token.
_WORD_PATTERN = r" ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"


def resolve_model(name: str, cache_dir: str | os.PathLike | None = None) -> str:
    """The name to pass to ``from_pretrained``: the folder of ``builtin/tiny``, or ``name`` itself.

    The first call builds the folder in ``cache_dir``, by default
    ``${XDG_CACHE_HOME:-~/.cache}/dschat``, or a temporary folder if that is not writable. The
    folder's name holds a hash of everything that determines its content.

    Raises:
        UserError: the disk has no space for it.
    """
    if name != TINY_NAME:
        return name
    folder = Path(cache_dir) if cache_dir is not None else writable_cache()
    folder = folder / f"tiny-{_content_hash()}"
    if not folder.is_dir():
        try:
            materialise_tiny(folder)
        except Exception as error:
            if not is_full(error):
                raise
            raise UserError(
                f"the cache {folder.parent} has no space for {TINY_NAME}: "
                f"{needed_and_free(_NUM_BYTES, folder)}; free some, or set XDG_CACHE_HOME to "
                "another folder"
            ) from None
    return str(folder)


def materialise_tiny(folder: str | os.PathLike, seed: int = 0) -> None:
    """Write the checkpoint to ``folder``: tokenizer, config, fp32 weights drawn from ``seed``.

    Atomic: written to a scratch folder next to it, then renamed. If two processes race, the first
    one wins; both write the same content. A non-empty folder is left unchanged. The caller's torch
    RNG state is preserved.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(scratch)
        _save_tiny_model(tokenizer, seed, scratch)
        scratch.chmod(0o755)  # mkdtemp's folders are private
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def tiny_tokenizer() -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer, trained on the built-in rows; deterministic.

    Any text round-trips. It has no BOS; EOS is ``<|end|>``, which closes the assistant's turn;
    ``<|pad|>`` is a separate token.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe()),
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        model_max_length=TINY_CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _trained_bpe() -> str:
    """The JSON of the tokenizer alone, which takes 0.2 s to train."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer.to_str()


@functools.cache
def _texts() -> list[str]:
    rows = builtin_rows()["train"]
    return [row[column] for row in rows for column in ("prompt", "chosen", "rejected")]


def _save_tiny_model(tokenizer: "PreTrainedTokenizerFast", seed: int, folder: Path) -> None:
    """Write config, weights and generation config."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    tokens = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), **TINY_CONFIG, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # NOTE: model.save_pretrained imports deepspeed if it is installed, which takes seconds and
    # prints to stdout. The head is tied: named_parameters lists its weight once.
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)


def _content_hash() -> str:
    """12 hex digits: a hash of the rows, the configuration and the libraries' versions."""
    import tokenizers
    import transformers

    recipe = [TINY_CONFIG, MAX_VOCAB_SIZE, SPECIAL_TOKENS, CHAT_TEMPLATE, _WORD_PATTERN]
    versions = [tokenizers.__version__, transformers.__version__]
    content = json.dumps([recipe, versions, _texts()])
    return hashlib.sha256(content.encode()).hexdigest()[:12]
