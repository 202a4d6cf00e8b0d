"""An answer's weight in a file scales its tokens in step 1's loss and in the loss's denominator."""

import json

import pytest
from byte_tokenizers import CHATML, byte_tokenizer
from dialogues import REPLY, USER
from tiny_models import causal_lm

from dschat.config import SFTConfig
from dschat.data.tokenize import sft_dataset
from dschat.models.heads import LanguageModel
from dschat.supervised.loop import SFTTask

TOKENIZER = byte_tokenizer("<|im_end|>", CHATML, pad_token="<|im_end|>")


def batch_of(path, *weights, **knobs):
    """A dialogue per pair of weights."""
    rows = []
    for first, last in weights:
        turns = [USER("u"), REPLY("yes"), USER("v"), REPLY("no way")]
        for turn, weight in zip(turns[1::2], (first, last), strict=True):
            if weight is not None:
                turn["weight"] = weight
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows))
    config = SFTConfig(data_path=[str(path)], data_split="1,0,0", eval_fraction=0.0, **knobs)
    return SFTTask().collate(list(sft_dataset(config, TOKENIZER)))


@pytest.fixture(scope="module")
def model():
    return LanguageModel(causal_lm("llama", vocab_size=len(TOKENIZER)))


def mean_loss(model, batch):
    total, sums = SFTTask().loss(model, batch)
    metrics = SFTTask().summarize({name: float(value) for name, value in sums.items()})
    assert metrics["loss"] == pytest.approx(total.item() / SFTTask().weight(batch))
    return total.item(), metrics["loss"]


@pytest.mark.parametrize("knobs", [{}, {"train_on_prompt": True}])
def test_a_weight_scales_an_answer_in_the_sum_and_the_denominator(tmp_path, model, knobs):
    file = tmp_path / "rows.jsonl"
    first, last, both = (
        batch_of(file, weights, **knobs) for weights in ((1, 0), (0, 1), (0.25, 0.5))
    )
    rest = batch_of(file, (0, 0.5), **knobs) if knobs else None
    assert first.weights is None
    assert both.weights is not None
    sums = [mean_loss(model, batch)[0] for batch in (first, last, both)]
    sizes = [SFTTask().weight(batch) for batch in (first, last, both)]
    if rest is None:
        assert sums[2] == pytest.approx(0.25 * sums[0] + 0.5 * sums[1])
        assert sizes[2] == pytest.approx(0.25 * sizes[0] + 0.5 * sizes[1])
    else:  # tokens of the prompts have weight 1 in every batch
        assert sums[2] - mean_loss(model, rest)[0] > 0
        assert sizes[2] == SFTTask().weight(rest) + 0.25 * len("yes!")


def test_rows_with_and_without_weights_share_a_batch(tmp_path, model):
    file = tmp_path / "rows.jsonl"
    mixed = batch_of(file, (None, None), (1, 0.5))
    plain, weighed = batch_of(file, (None, None)), batch_of(file, (1, 0.5))
    total = mean_loss(model, plain)[0] + mean_loss(model, weighed)[0]
    assert mean_loss(model, mixed)[0] == pytest.approx(total, rel=1e-5)
    assert SFTTask().weight(mixed) == SFTTask().weight(plain) + SFTTask().weight(weighed)
