"""Where a tokenizer and a model's embedding meet: as many rows as ids, and whether two tokenizers
mean the same by an id.

Tokenizers and modules come in. The embedding may have more rows than the tokenizer has ids (padded
for speed), never fewer. It must not know ZeRO: a module that loads in shards is grown inside the
scope it loads in.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("dschat")

# Where tokenizers differ: spaces, digits, case, accents, scripts, punctuation, line breaks.
_PROBE = "The  quick brown fox's 12345 jumps;\n\nover Ångström's naïve café, 東京 и 3.14% <|x|> !"


def num_ids(tokenizer: Any) -> int:
    """The rows an embedding needs for this tokenizer: its largest id + 1 (ids may have gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def embedding_rows(config: PretrainedConfig) -> int:
    """The rows that a checkpoint's embedding has."""
    return config.get_text_config().vocab_size


def grow_embeddings(model: PreTrainedModel, num_tokens: int) -> bool:
    """Give embedding and head ``num_tokens`` rows where they have fewer; True if they had.

    New rows are the mean of the old ones (Hewitt 2021, "Initializing new word embeddings for
    pretrained language models"): a new token is then about as likely as the average one. Without
    noise, so that the actor and its reference, or two ranks, get the same. ``config.vocab_size``
    and ties follow. Under ZeRO-3 the grown matrices are whole until an engine shards them.
    """
    old = embedding_rows(model.config)
    if num_tokens <= old:
        return False
    # NOTE: transformers' own mean_resizing draws the rows at random, from a covariance that takes
    # minutes for a large model.
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    layers = {id(layer.weight): layer for layer in _token_layers(model)}
    for layer in layers.values():
        _set_to_mean(layer.weight.data, old)
        if getattr(layer, "bias", None) is not None:
            _set_to_mean(layer.bias.data, old)
    logger.info("embedding grown from %d to %d rows, for the tokenizer's ids", old, num_tokens)
    return True


def match_vocabulary(
    config: PretrainedConfig, model_config: PretrainedConfig, frozen: bool = False
) -> None:
    """Give ``config``, as the checkpoint had it, rows and pad id of the model made from it.

    ``frozen``: the embedding will not be trained, which is worth a warning where it has grown.
    """
    if frozen and embedding_rows(model_config) > embedding_rows(config):
        logger.warning(
            "NEW TOKENS ARE NOT TRAINED: LoRA freezes the embedding, so their rows stay the mean "
            "of the others; train it with --only_optimize_lora false"
        )
    config.get_text_config().vocab_size = embedding_rows(model_config)
    config.pad_token_id = model_config.pad_token_id


def _token_layers(model: PreTrainedModel) -> list[nn.Module]:
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [layer for layer in layers if layer is not None]


@torch.no_grad()
def _set_to_mean(rows: torch.Tensor, num_old: int) -> None:
    assert rows.shape[0] > num_old, "the matrix is in shards, or did not grow"
    rows[num_old:] = rows[:num_old].float().mean(0).to(rows.dtype)


def same_ids(tokenizer: Any, other: Any) -> bool:
    """Whether every id of ``tokenizer`` means the same token in ``other``, which may have more
    (step 2 adds a pad token), and an answer ends with the same one.
    """
    if tokenizer.eos_token_id != other.eos_token_id:
        return False
    vocabulary = other.get_vocab()
    return all(vocabulary.get(token) == i for token, i in tokenizer.get_vocab().items())


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Whether ``other`` would make the same ids of a text or a chat as ``tokenizer``.

    Decided by vocabulary, by what becomes of a text full of awkward places, and by the chat
    template, where ``other`` has one.
    """
    return (
        same_ids(tokenizer, other)
        and tokenizer(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]
        and (other.chat_template is None or other.chat_template == tokenizer.chat_template)
    )
