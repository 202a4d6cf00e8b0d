"""Loading a tokenizer, and which ids mean padding and end.

A model name comes in, a Hugging Face tokenizer goes out. It must not know models or data.
"""

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dschat.config import UserError

PAD_TOKEN = "<|pad|>"


def load_tokenizer(
    name_or_path: str, flag: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. ``flag`` is named in the ``UserError`` where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag} {name_or_path}: no tokenizer there, in a folder or on the hub; "
            "save one with the model (tokenizer.save_pretrained)"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{flag} {name_or_path}: its tokenizer has no EOS token; set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        # Masks come from lengths, so any id will do to fill a batch with.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give the tokenizer a pad token other than EOS; True if one was added.

    transformers scores a sequence at its last token that is not padding, so a reward model
    whose pad is EOS would be read one token too early.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return False
    tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    return True


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's EOS and the checkpoint's own list."""
    ids = getattr(generation_config, "eos_token_id", None)
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(sorted({i for i in (*listed, tokenizer.eos_token_id) if i is not None}))
