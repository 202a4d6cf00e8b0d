"""Streaming from disk: every file format, old names, and each way a checkpoint can be broken.

The oracle is the module that a checkpoint was saved from, and transformers' own loader.
"""

import json
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CONFIGS, causal_lm
from transformers import AutoModelForCausalLM

from dschat.config import UserError
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.checkpoint_tensors import normalized_names


def checkpoint_stream(path, names=str):
    return CheckpointFiles(path, "path").tensors(names)


def stored(module):
    """What a checkpoint of ``module`` holds: its state dict without second names of a tie."""
    tied = module.all_tied_weights_keys or {}
    return {name: t for name, t in module.state_dict().items() if name not in tied}


def save_bin(state, folder, legacy=False, parts=1):
    """``pytorch_model.bin`` of ``state``, or ``parts`` shards with an index."""
    folder.mkdir(exist_ok=True)
    zipped = {"_use_new_zipfile_serialization": not legacy}
    if parts == 1:
        torch.save(state, folder / "pytorch_model.bin", **zipped)
        return folder
    weight_map = {}
    for part in range(parts):
        file = f"pytorch_model-{part + 1:05}-of-{parts:05}.bin"
        mine = dict(list(state.items())[part::parts])
        torch.save(mine, folder / file, **zipped)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A tiny Llama in several safetensors shards."""
    folder = tmp_path_factory.mktemp("sharded")
    causal_lm("llama").save_pretrained(folder, max_shard_size="20KB")
    return folder


def assert_same(stream, expected):
    got = [(name, tensor.clone()) for name, tensor in stream]
    assert sorted(name for name, _ in got) == sorted(expected)  # each exactly once
    for name, tensor in got:
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


# Formats


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_one_safetensors_file(family, tmp_path):
    module = causal_lm(family)
    module.save_pretrained(tmp_path)
    names = normalized_names(module.state_dict(), module.base_model_prefix + ".")
    assert_same(checkpoint_stream(tmp_path, names), stored(module))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "opt", "gpt2"])
def test_safetensors_shards(family, tmp_path):
    module = causal_lm(family).bfloat16()
    module.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(checkpoint_stream(str(tmp_path)), stored(module))
    assert CheckpointFiles(tmp_path, "path").keys == stored(module).keys()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("legacy", [False, True])
def test_bin_files(legacy, parts, tmp_path):
    """Of plain tensors where a tie stands under both names, and of parameters."""
    for number, state in enumerate(
        (causal_lm("llama_tied").state_dict(), dict(causal_lm("gpt2").named_parameters()))
    ):
        folder = save_bin(state, tmp_path / str(number), legacy, parts)
        assert_same(checkpoint_stream(folder), state)
        assert CheckpointFiles(folder, "path").keys == state.keys()


@pytest.mark.parametrize("best", range(4))
def test_the_order_of_preference_is_transformers_own(best, tmp_path):
    """Four checkpoints of one model lie in the folder; take the preferred ones away, one by one."""
    names = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    models = [causal_lm("llama", seed=seed) for seed in range(4)]
    models[0].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "kept")
    models[1].save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "kept").rename(tmp_path / "model.safetensors")
    for seed, parts in ((2, 1), (3, 2)):
        save_bin(models[seed].state_dict(), tmp_path, parts=parts)
    for name in names[:best]:
        (tmp_path / name).unlink()
    assert_same(checkpoint_stream(tmp_path), models[best].state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(checkpoint_stream(tmp_path), loaded.state_dict())


def test_a_hub_name_is_found_in_the_cache(sharded, tmp_path, monkeypatch):
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / ("a" * 40)).symlink_to(sharded)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_same(checkpoint_stream("someone/tiny"), causal_lm("llama").state_dict())
    with pytest.raises(UserError, match="^path someone/else: no such folder, and no such"):
        next(checkpoint_stream("someone/else"))


# Memory


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy bin"])
def test_one_tensor_lives_at_a_time(form, sharded, tmp_path):
    folder = sharded
    if form != "safetensors":
        state = causal_lm("llama").state_dict()
        folder = save_bin(state, tmp_path / "x", legacy=form == "legacy bin", parts=2)
    alive = []
    stream = checkpoint_stream(folder)
    for _, tensor in stream:
        alive.append(weakref.ref(tensor))
        del tensor
        assert [ref() for ref in alive if ref() is not None] == []
    assert len(alive) > 10


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's own count")
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_mapped_files_take_no_memory_of_our_own(form, tmp_path):
    """Walking 64 MiB and reading every element: anonymous memory must not grow by the file."""
    state = {f"t{i}.weight": torch.ones(2**20) for i in range(16)}
    folder = tmp_path / "x"
    if form == "bin":
        save_bin(state, folder)
    else:
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
    del state
    before = anonymous_mib()
    for _, tensor in checkpoint_stream(folder):
        assert tensor.sum() == 2**20
        assert anonymous_mib() - before < 32


def anonymous_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def test_a_name_turned_down_is_not_read(sharded):
    wanted = {"lm_head.weight", "model.norm.weight"}
    stream = checkpoint_stream(sharded, lambda name: name if name in wanted else None)
    assert_same(stream, {k: v for k, v in causal_lm("llama").state_dict().items() if k in wanted})


# Names


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_names_of_every_family_with_and_without_its_prefix(family):
    module = causal_lm(family)
    expected, prefix = set(module.state_dict()), module.base_model_prefix + "."
    bare = {name.removeprefix(prefix) for name in expected}
    assert len(bare) == len(expected)
    for name in expected:
        for spelling in (name, name.removeprefix(prefix), "module." + name, prefix + name):
            assert normalized_names(expected, prefix)(spelling) == name
        assert normalized_names(bare, prefix)(name) == name.removeprefix(prefix)


@pytest.mark.parametrize("family", ["opt", "opt_350m", "gpt2", "gpt_neox", "bloom"])
def test_a_checkpoint_of_the_bare_base_model_is_read_as_transformers_reads_it(family, tmp_path):
    module = causal_lm(family)
    module.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    prefix = module.base_model_prefix + "."
    old = {name.removeprefix(prefix): t for name, t in stored(module).items()}
    torch.save(old, tmp_path / "pytorch_model.bin")
    names = normalized_names(stored(module), prefix)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(checkpoint_stream(tmp_path, names), stored(loaded))


GPT2 = {
    "transformer.h.0.ln_1.weight",
    "transformer.h.0.ln_1.bias",
    "transformer.h.0.attn.c_attn.bias",
}


@pytest.mark.parametrize(
    ("name", "expected", "prefix", "wanted"),
    [
        ("h.0.ln_1.gamma", GPT2, "transformer.", "transformer.h.0.ln_1.weight"),
        ("module.h.0.ln_1.beta", GPT2, "transformer.", "transformer.h.0.ln_1.bias"),
        ("_orig_mod.module.h.0.ln_1.bias", GPT2, "transformer.", "transformer.h.0.ln_1.bias"),
        ("h.0.attn.c_attn.bias", GPT2, "transformer.", "transformer.h.0.attn.c_attn.bias"),
        # constants, and weights whose names look like them
        ("h.0.attn.bias", GPT2, "transformer.", None),
        ("module.transformer.h.0.attn.masked_bias", GPT2, "transformer.", None),
        ("gpt_neox.layers.0.attention.bias", set(), "gpt_neox.", None),
        ("gpt_neox.layers.0.attention.masked_bias", set(), "gpt_neox.", None),
        ("gpt_neox.layers.0.attention.rotary_emb.inv_freq", set(), "gpt_neox.", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", set(), "model.", None),
        ("x.attn.bias", {"x.attn.bias"}, "model.", "x.attn.bias"),
        # GPT-NeoX's head, for a reader that goes by the module and one that goes by the disk
        ("embed_out.weight", {"lm_head.weight"}, "gpt_neox.", "lm_head.weight"),
        ("module.lm_head.weight", {"embed_out.weight"}, "gpt_neox.", "embed_out.weight"),
        # nothing answers to them: the reader hears of them by the names on disk
        ("layers.0.attention.dense.bias", set(), "m.", "layers.0.attention.dense.bias"),
        ("module.score.weight", GPT2, "transformer.", "module.score.weight"),
        ("h.9.ln_1.gamma", GPT2, "transformer.", "h.9.ln_1.gamma"),
        # a real parameter called gamma stays what it is
        ("layer.gamma", {"layer.gamma", "layer.weight"}, "model.", "layer.gamma"),
        ("lm_head.weight", {"lm_head.weight"}, "", "lm_head.weight"),
    ],
)
def test_names(name, expected, prefix, wanted):
    assert normalized_names(expected, prefix)(name) == wanted


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    state = {"norm.weight": torch.ones(2), "model.norm.weight": torch.zeros(2)}
    folder = save_bin(state, tmp_path / "x")
    names = normalized_names({"model.norm.weight"}, "model.")
    with pytest.raises(UserError, match=r"model.norm.weight of pytorch_model.bin is a second"):
        list(checkpoint_stream(folder, names))


# What a user can get wrong: one line, with the file in it, and no traceback into the library


def saved(folder, **options):
    """The weights' files of a tiny Llama."""
    causal_lm("llama").save_pretrained(folder, **options)
    return sorted(folder.glob("*.safetensors"))


def binary(folder, content, **options):
    torch.save(content, folder / "pytorch_model.bin", **options)
    return folder / "pytorch_model.bin"


def shorten(file, count=1):
    file.write_bytes(file.read_bytes()[:-count])


INDEX, ADAPTER = "model.safetensors.index.json", '{"base_model_name_or_path": "some/base"}'
SHARDS, OLD = {"max_shard_size": "20KB"}, {"_use_new_zipfile_serialization": False}
POINTER = b"version https://git-lfs.github.com/spec/v1\n"
HTML = b"<html>not found</html>"
UNREADABLE = "pytorch_model.bin (cannot be read .* incomplete|is damaged)"
BROKEN = {
    "no folder": (lambda f: f.rmdir(), "no such folder, and .*check the name"),
    "a file": (
        lambda f: (f.rmdir(), f.touch()),
        "is a file; name the folder of a checkpoint",
    ),
    "no weights": (
        lambda f: (f / "config.json").write_text("{}"),
        "holds no weights; name another",
    ),
    "adapter": (
        lambda f: (f / "adapter_config.json").write_text(ADAPTER),
        "is a LoRA adapter; merge it into some/base first",
    ),
    "missing shard": (
        lambda f: saved(f, **SHARDS)[1].unlink(),
        r"1 of the \d files of its .*index.json are missing: model-00002-of",
    ),
    "truncated": (lambda f: shorten(*saved(f)), "model.safetensors cannot be read .* incomplete"),
    "truncated last shard": (
        lambda f: shorten(saved(f, **SHARDS)[-1]),
        r"model-(\d+)-of-\1.safetensors cannot be read .* incomplete",
    ),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(HTML),
        "model.safetensors cannot be read .* damaged",
    ),
    "index of a bin": (
        lambda f: (f / "pytorch_model.bin.index.json").write_text("[]"),
        "pytorch_model.bin.index.json is not an index",
    ),
    **{
        f"index {text[:20]}": (lambda f, t=text: (f / INDEX).write_text(t), f"{INDEX} is not an")
        for text in ('{"weight_map": ', '{"weight_map": {"lm_head.weight": 3}}', "[" * 100_000)
    },
    "pointer": (lambda f: (f / "pytorch_model.bin").write_bytes(POINTER), UNREADABLE),
    "empty": (lambda f: (f / "pytorch_model.bin").touch(), UNREADABLE),
    "truncated bin": (
        lambda f: shorten(binary(f, causal_lm("llama").state_dict()), 100),
        UNREADABLE,
    ),
    "truncated legacy bin": (
        lambda f: shorten(binary(f, causal_lm("llama").state_dict(), **OLD), 100),
        UNREADABLE,
    ),
    "training state": (
        lambda f: binary(f, {"epoch": 3, "model": {}}),
        "pytorch_model.bin holds a int, not tensors by name",
    ),
    "a tensor": (
        lambda f: binary(f, torch.ones(3)),
        "pytorch_model.bin holds a Tensor, not tensors by name",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_one_line(name, tmp_path):
    """Found before the first tensor."""
    breaks, message = BROKEN[name]
    breaks(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        next(checkpoint_stream(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_reader_raises_is_its_own(sharded):
    """An error in `names` or in the loop over the stream must not be taken for a damaged file."""

    def fails(_):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        list(checkpoint_stream(sharded, names=fails))
    with pytest.raises(OSError, match="disk full"):
        list(map(fails, checkpoint_stream(sharded)))
