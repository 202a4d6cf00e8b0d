"""Loads tokenizers and completes them: EOS, pad token and chat template.

The completed tokenizer is saved with the model, so that other programs use what training used. A
model's embedding may have more rows than its tokenizer has ids (padded for speed), never fewer.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.config.fields import read_text
from dschat.models import checkpoint_files
from dschat.models.chat_template import (
    bare_template,
    default_template,
    failure,
    merge_system,
    rendered,
    set_template_defaults,
    turn_ends,
)
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.config_files import read_generation_config

logger = logging.getLogger("dschat")

PAD_TOKEN = "<|pad|>"
TOKENIZER_CONFIG = "tokenizer_config.json"


def load_tokenizer(
    name_or_path: str, flag: str, trust_remote_code: bool = False, **flags: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, completed by ``flags``; see `complete_tokenizer`.

    Raises:
        UserError: naming ``flag``: no tokenizer, or one without EOS.
    """
    files = CheckpointFiles(name_or_path, flag, trust_remote_code)
    return complete_tokenizer(files, read_tokenizer(files), **flags)


def complete_tokenizer(
    files: CheckpointFiles,
    tokenizer: PreTrainedTokenizerBase,
    eot_token: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    system_message: str = "merge",
) -> PreTrainedTokenizerBase:
    """The ``tokenizer`` of ``files``, changed in place: with an EOS, a pad token and a template.

    Args:
        eot_token: replaces EOS as the end of an answer; added to the vocabulary if new.
        chat_template: a file that replaces the tokenizer's own template.
        chat_template_kwargs: become defaults of the template's variables.
        system_message: "merge" lets a template without a place for a system message put its text
            in front of the first user turn.

    Raises:
        UserError: no EOS; or a template that is empty, or does not read one of the variables.
    """
    if eot_token is not None and eot_token != tokenizer.eos_token:
        # Everything reads EOS as the end of an answer; a template may contain the old one.
        former, template = tokenizer.eos_token, tokenizer.chat_template
        tokenizer.add_special_tokens({"eos_token": eot_token})
        if former and isinstance(template, str):
            tokenizer.chat_template = template.replace(former, eot_token)
    if tokenizer.eos_token_id is None:
        raise files.error(
            ": its tokenizer has no EOS token; set tokenizer.eos_token, or add one with --eot_token"
        )
    if tokenizer.pad_token_id is None:
        # Masks come from lengths, so any id can fill a batch.
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template, tokenizer)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    if not str(tokenizer.chat_template).strip():
        origin = f"--chat_template {chat_template}"
        origin = origin if chat_template else f"{files.flag} {files.name}"
        raise UserError(f"{origin}: the chat template is empty; restore it, or name another one")
    if system_message == "merge":
        merge_system(tokenizer)
    set_template_defaults(tokenizer, chat_template_kwargs or {})
    tokenizer.generation_config = read_generation_config(files)  # for `stop_ids`
    return tokenizer


def read_tokenizer(files: CheckpointFiles) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, unchanged: it may lack EOS, pad token and chat template.

    Raises:
        UserError: no tokenizer, a damaged one, or one that needs its own code.
    """
    source = _source(files)
    checkpoint_files.prepare_hub(source)
    try:
        trust = files.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    # It raises any exception, even a bare Exception of the Rust library.
    except Exception as error:
        if not files.trust_remote_code and files.brings_code(TOKENIZER_CONFIG):
            reason = (
                "its tokenizer needs its own Python code, which does not run by default: "
                "read it, and pass --trust_remote_code if you trust it"
            )
        elif source != files.name:
            reason = (
                f"it has only a vocabulary, as DeepSpeed-Chat saved it, and the tokenizer of its "
                f"base model ({source}) cannot be loaded; copy that one's files into the folder"
            )
        elif any(Path(files.name).glob("tokenizer*")):
            where = _damaged_file(files)
            reason = f"its {where} cannot be read ({first_line(error)}); copy or download it again"
        else:
            reason = (
                "no tokenizer in this folder or on the hub; save one with the model "
                "(tokenizer.save_pretrained)"
            )
        raise files.error(f": {reason}") from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or longest < 1:
        problem = f"cannot be used: model_max_length is {longest!r} (not a number above 0)"
        raise files.file_error(TOKENIZER_CONFIG, problem)
    return tokenizer


def _damaged_file(files: CheckpointFiles) -> str:
    """The file, or files, that may break a tokenizer.

    Raises:
        UserError: one of the files is not a JSON object.
    """
    for filename in (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"):
        files.json(filename)
    template = Path(files.name) / "chat_template.jinja"
    if template.exists() and "\ufffd" in template.read_text("utf-8", "replace"):
        return template.name
    return f"tokenizer.json or {TOKENIZER_CONFIG}" if files.json("tokenizer.json") else "tokenizer"


def _source(files: CheckpointFiles) -> str:
    """The folder or hub name to load the tokenizer of ``files`` from.

    DeepSpeed-Chat saved the vocabulary without special tokens; loaded as it is, the tokenizer would
    get wrong ones. The folder's config.json names the checkpoint it started from, which has them.
    """
    folder = Path(files.name)
    complete = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model")
    if not folder.is_dir() or any((folder / name).exists() for name in complete):
        return files.name
    try:
        origin = (files.json(CONFIG) or {}).get("_name_or_path")
    except UserError:
        return files.name
    return origin if origin and isinstance(origin, str) else files.name


def _read_template(file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(
            f"--chat_template {file} cannot be read ({reason}); name a file with a Jinja template"
        ) from error
    try:
        rendered(tokenizer, [{"role": "user", "content": "?"}], chat_template=template)
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            f"--chat_template {file} cannot render a chat ({failure(error)}); fix it"
        ) from error
    return template


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a pad token other than EOS.

    transformers takes a sequence's score at its last non-pad token. If pad is EOS, that is one
    token before the one that training used.
    """
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Every id that ends an answer, sorted: EOS, those with which the chat template ends a turn,
    and those of the generation configs: ``generation_config``, and the one beside the tokenizer.

    An answer's last token is its first of them, in every step and program. What the template writes
    after it has no loss and is in front of no score.
    """
    found = {tokenizer.eos_token_id, *turn_ends(tokenizer, str(tokenizer.chat_template))}
    for config in (generation_config, getattr(tokenizer, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found |= {*ids} if isinstance(ids, (list, tuple)) else {ids}
    return tuple(sorted(found - {None}))


def text_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], begins: bool = True
) -> list[list[int]]:
    """Ids of texts; if they begin a sequence, behind the BOS that the tokenizer adds, unless a text
    has it. An EOS that the tokenizer appends is left out: it would end a prompt.
    """
    if not texts:
        return []
    alone, framed = (tokenizer("a", add_special_tokens=s)["input_ids"] for s in (False, True))
    starts = (n for n in range(len(framed)) if framed[n : n + len(alone)] == alone)
    head = framed[: next(starts, 0)] if begins else []
    # verbose=False: no warning about texts beyond the model's limit; tokenize.py cuts them
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) if ids[: len(head)] == head else [*head, *ids] for ids in rows]


# Text on which tokenizers differ: spaces, digits, case, accents, scripts, punctuation, newlines.
_PROBE = "The  quick brown fox's 12345 jumps;\n\nover Ångström's naïve café, 東京 и 3.14% <|x|> !"


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for this tokenizer: its largest id + 1 (ids may have gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def embedding_rows(config: PretrainedConfig) -> int:
    """Rows of a checkpoint's embedding."""
    return config.get_text_config().vocab_size


def grow_embeddings(model: PreTrainedModel, num_tokens: int) -> None:
    """Grow embedding and head to ``num_tokens`` rows if they have fewer.

    New rows are the mean of the old ones (Hewitt 2021, "Initializing new word embeddings for
    pretrained language models"), so a new token is about as likely as the average one. Without
    noise, so that actor and reference, and all ranks, agree. ``config.vocab_size`` and ties follow.
    Under ZeRO-3 the grown matrices stay unsharded until an engine shards them.
    """
    old = embedding_rows(model.config)
    if num_tokens <= old:
        return
    # NOTE: transformers' mean_resizing samples the rows from a covariance, which takes minutes for
    # a large model.
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    for layer in {id(layer.weight): layer for layer in layers if layer is not None}.values():
        _set_to_mean(layer.weight.data, old)
        if (bias := getattr(layer, "bias", None)) is not None:
            _set_to_mean(bias.data, old)
    logger.info("embedding grown from %d to %d rows to match the tokenizer", old, num_tokens)


def drop_pad(config: PretrainedConfig) -> int | None:
    """Remove the pad id from ``config`` and return it, for a model whose embedding treats all rows
    alike. ``nn.Embedding`` rejects a padding_idx that it has no row for, takes -1 as its last row
    and trains none; Youtu zeroes it at every load. Masks come from lengths.
    """
    text = config.get_text_config()
    pad_token_id = getattr(text, "pad_token_id", None)
    for part in (text, config):
        vars(part)["pad_token_id"] = None  # some classes validate that it is a number
    return pad_token_id


def match_vocabulary(
    config: PretrainedConfig, model_config: PretrainedConfig, frozen: bool = False
) -> None:
    """Copy vocabulary size and pad id of a loaded model to its checkpoint's ``config``.

    ``frozen``: the embedding does not train; then a grown embedding logs a warning.
    """
    if frozen and embedding_rows(model_config) > embedding_rows(config):
        logger.warning(
            "NEW TOKENS ARE NOT TRAINED: LoRA freezes the embedding, so their rows stay the mean "
            "of the other rows; train it with --only_optimize_lora false"
        )
    config.get_text_config().vocab_size = embedding_rows(model_config)
    config.pad_token_id = model_config.pad_token_id


@torch.no_grad()
def _set_to_mean(rows: torch.Tensor, num_old: int) -> None:
    assert rows.shape[0] > num_old, "the matrix is sharded, or did not grow"
    rows[num_old:] = rows[:num_old].float().mean(0).to(rows.dtype)


def same_ids(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether all tokens of ``tokenizer`` have the same ids in ``other``, and EOS is the same.

    ``other`` may have more tokens: step 2 adds a pad token.
    """
    if tokenizer.eos_token_id != other.eos_token_id:
        return False
    vocabulary = other.get_vocab()
    return all(vocabulary.get(token) == i for token, i in tokenizer.get_vocab().items())


def same_tokens(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether ``other`` encodes texts and chats to the same ids as ``tokenizer``.

    Compares the vocabularies, the ids of a text with edge cases, and the chat templates if
    ``other`` has one.
    """
    return (
        same_ids(tokenizer, other)
        and tokenizer(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]
        and (other.chat_template is None or bare_template(other) == bare_template(tokenizer))
    )
