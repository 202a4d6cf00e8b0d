"""``builtin/tiny``: a Llama of half a million random weights and a tokenizer, made on the spot.

Comes in: the name ``builtin/tiny``, or any other model name. Goes out: the path of an ordinary
Hugging Face folder, made once and kept in the user's cache; other names pass through. The built-in
rows serve as text for the tokenizer alone: this module must not know what they mean, nor anything
of training.

torch and transformers are imported where a checkpoint is really made: another name costs nothing.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from dschat.builtin.chat_rows import builtin_rows
from dschat.config import UserError
from dschat.disk_space import is_full, needed_and_free

TINY_NAME = "builtin/tiny"

END, PAD, USER, ASSISTANT, SYSTEM = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)  # ids 0 to 4
MAX_VOCAB_SIZE = 1024

# Each message is rendered by itself: the rendering of a conversation's beginning is a prefix of the
# whole conversation's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# As little as learns the built-in tasks: two layers can copy and look up, and decode twice as fast
# as four. Initial weights are wide: with 0.02, five epochs of SFT reach half the gold score.
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

_NUM_BYTES = 9 << 18  # of the folder, about: half a million fp32 weights, and the tokenizer

# A word keeps its leading space; every digit is a token of its own.
_WORD_PATTERN = r" ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"


def resolve_model(name: str, cache_dir: str | os.PathLike | None = None) -> str:
    """What ``from_pretrained`` takes: the folder of ``builtin/tiny``, or ``name`` as it is.

    The folder lies in ``cache_dir`` (default ``${XDG_CACHE_HOME:-~/.cache}/dschat``, or a temporary
    folder where that cannot be written) and is made at the first call. Its name carries a hash of
    all that determines its content.

    Raises ``UserError`` where the disk has no space for it.
    """
    if name != TINY_NAME:
        return name
    folder = Path(cache_dir) if cache_dir is not None else _user_cache_dir()
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
    """Make the checkpoint in ``folder``: tokenizer, config, fp32 weights drawn from ``seed``.

    The folder appears complete or not at all: it is written beside its place and renamed. Where two
    processes race, the first wins, and both find the same content. A folder that already holds
    files is left as it is. The caller's torch random state is not touched.
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


def tiny_tokenizer():
    """A byte-level BPE ``PreTrainedTokenizerFast``, trained on the built-in rows.

    Any text round-trips. No token opens a sequence; ``<|end|>`` closes the assistant's turn and is
    the EOS; ``<|pad|>`` is a token of its own. The ids are the same at every call.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        model_max_length=TINY_CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _texts() -> list[str]:
    rows = builtin_rows()["train"]
    return [row[column] for row in rows for column in ("prompt", "chosen", "rejected")]


def _save_tiny_model(tokenizer, seed: int, folder: Path) -> None:
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
    # NOTE: model.save_pretrained imports deepspeed where it is installed, which takes seconds and
    # prints to stdout. The tied head is not a weight of its own.
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)


def _content_hash() -> str:
    """12 hex digits that change with the rows, the recipe or the libraries that write it."""
    import tokenizers
    import transformers

    recipe = [TINY_CONFIG, MAX_VOCAB_SIZE, SPECIAL_TOKENS, CHAT_TEMPLATE, _WORD_PATTERN]
    versions = [tokenizers.__version__, transformers.__version__]
    content = json.dumps([recipe, versions, _texts()])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _user_cache_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dschat"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        return Path(tempfile.gettempdir()) / f"dschat-{os.getuid()}"
