"""The weight stream: whole tensors by checkpoint name, also from ZeRO-3 shards."""

import pytest
import torch
from quick import each_once
from tiny_models import VOCAB, causal_lm
from transformers import AutoModelForCausalLM

from dschat.hybrid.weight_stream import (
    Buckets,
    Shard,
    adapter_stream,
    empty_copy,
    fill,
    module_shards,
    weight_stream,
    whole_tensors,
)
from dschat.models.lora import add_lora
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading, unwrap

CPU = torch.device("cpu")
BUCKETS = [1, 5000, 1 << 30]  # bytes: a tensor each, a few together, all at once


def sharded(path):
    zero = ZeroSettings(3, torch.float32)
    with sharded_loading(zero):
        model = AutoModelForCausalLM.from_pretrained(path)
    return unwrap(initialize_frozen(model, zero))


@pytest.mark.parametrize(
    ("name", "bucket_bytes"), each_once(["llama", "llama_tied", "opt_350m", "gpt2"], BUCKETS)
)
def test_sharded_weights_come_whole_and_once(name, bucket_bytes, tiny):
    module = sharded(tiny(name))
    expected = dict(causal_lm(name).named_parameters())
    seen = []
    for key, tensor in weight_stream(module, CPU, buckets=Buckets(bucket_bytes)):
        assert torch.equal(tensor, expected[key])
        seen.append(key)
    assert sorted(seen) == sorted(expected)


def test_whole_weights_do_not_move():
    model = causal_lm("llama")
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    assert {n: t.data_ptr() for n, t in weight_stream(model, CPU)} == pointers


def test_saved_buffers_travel_and_others_do_not():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    assert [s.name for s in module_shards(model)] == [
        "0.weight",
        "0.bias",
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    ]


def test_partitioned_shards_are_joined_without_their_padding(tiny):
    sharded(tiny("llama"))  # joins the process group
    shards = [
        Shard("a", torch.Size([2, 3]), torch.arange(8.0), partitioned=True),
        Shard("whole", torch.Size([2]), torch.tensor([7.0, 8.0]), partitioned=False),
        Shard("half", torch.Size([3]), torch.arange(4.0).bfloat16(), partitioned=True),
        Shard("b", torch.Size([1]), torch.tensor([5.0]), partitioned=True),
    ]
    got = {name: tensor.tolist() for name, tensor in whole_tensors(shards, CPU)}
    assert got == {"a": [[0, 1, 2], [3, 4, 5]], "whole": [7, 8], "half": [0, 1, 2], "b": [5]}
    assert list(got) == ["a", "half", "b", "whole"]


def test_replacements_take_the_place_of_weights_in_their_dtype():
    model = causal_lm("llama").to(torch.bfloat16)
    average = torch.full((64, 32), 0.3)
    replace = {"lm_head.weight": Shard("lm_head.weight", torch.Size([64, 32]), average, False)}
    stream = dict(weight_stream(model, CPU, replace))
    assert stream["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(stream["lm_head.weight"], average.bfloat16())
    assert torch.equal(stream["model.norm.weight"], model.model.norm.weight)


def test_the_adapter_stream_has_adapters_only():
    wrapped = add_lora(causal_lm("llama"), 2, 0, ["q_proj"], True, "--x")
    names = [name for name, _ in adapter_stream(wrapped, CPU)]
    assert len(names) == 4
    assert all(".q_proj.lora_" in name for name in names)


# -- copies filled from a stream -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "opt", "gpt2"])
def test_fill_makes_the_same_model(name, tiny):
    source = AutoModelForCausalLM.from_pretrained(tiny(name)).eval()
    copy = empty_copy(source.config, torch.float32, CPU)
    fill(copy, source.named_parameters())
    ids = torch.arange(2, 12).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, source(ids).logits, atol=0, rtol=0)


def test_fill_insists_on_every_weight_exactly_once(tiny):
    source = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    weights = list(source.named_parameters())

    def filled(stream):
        fill(empty_copy(source.config, torch.float32, CPU), stream)

    with pytest.raises(AssertionError, match="lacks .*lm_head.weight"):
        filled([w for w in weights if w[0] != "lm_head.weight"])
    with pytest.raises(AssertionError, match="has nonsense"):
        filled([*weights, ("nonsense", weights[0][1])])
    with pytest.raises(AssertionError, match="has lm_head.weight twice"):
        filled([*weights, weights[-1]])
    with pytest.raises(AssertionError, match="lm_head.weight has another shape"):
        filled([*weights[:-1], ("lm_head.weight", torch.ones(VOCAB, 1))])
