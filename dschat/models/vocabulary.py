"""Matches a model's embedding to its tokenizer, and compares tokenizers.

An embedding may have more rows than the tokenizer has ids (padded for speed), never fewer. Under
ZeRO-3, `grow_embeddings` runs inside the loading context.
"""

import logging

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat.models.chat_template import bare_template

logger = logging.getLogger("dschat")

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
