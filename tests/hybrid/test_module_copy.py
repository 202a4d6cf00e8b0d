"""A whole copy of a model, filled from a weight stream."""

import pytest
import torch
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from dschat.hybrid.weight_stream import empty_copy, fill


@pytest.mark.parametrize("name", ["llama_tied", "opt", "gpt2"])
def test_fill_makes_the_same_model(name, tiny):
    source = AutoModelForCausalLM.from_pretrained(tiny(name)).eval()
    copy = empty_copy(source.config, torch.float32, torch.device("cpu"))
    fill(copy, source.named_parameters())
    ids = torch.arange(2, 12).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, source(ids).logits, atol=0, rtol=0)


def test_fill_insists_on_every_weight_exactly_once(tiny):
    source = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    weights = list(source.named_parameters())

    def filled(stream):
        fill(empty_copy(source.config, torch.float32, torch.device("cpu")), stream)

    with pytest.raises(RuntimeError, match="lacks .*lm_head.weight"):
        filled([w for w in weights if w[0] != "lm_head.weight"])
    with pytest.raises(RuntimeError, match="has nonsense"):
        filled([*weights, ("nonsense", weights[0][1])])
    with pytest.raises(RuntimeError, match="has lm_head.weight twice"):
        filled([*weights, weights[-1]])
    with pytest.raises(RuntimeError, match="lm_head.weight"):  # of another shape: no broadcasting
        filled([*weights[:-1], ("lm_head.weight", torch.ones(VOCAB, 1))])
