"""Loading: exactly the checkpoint's weights, or one line that names what is wrong; ZeRO-3 too."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from step_cases import PROBES, probe_logprobs, probe_scores
from tiny_models import EOS, PAD, VOCAB, causal_lm, score_model, tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.config import UserError
from dschat.data.collate import pad_right
from dschat.deepspeed_setup import ZeroSettings, initialize_frozen, sharded_loading, unwrap
from dschat.models.kind import checkpoint_keys, load_config
from dschat.models.load import (
    load_causal_lm,
    load_score_backbone,
    set_dropout,
)
from dschat.models.lora import add_lora
from dschat.models.reward import ScoreModel

FP32 = torch.float32
FLAG = "--model_name_or_path"
STAGES = pytest.mark.parametrize("stage", [0, 3])


def scope(stage):
    return sharded_loading(ZeroSettings(3, FP32)) if stage == 3 else nullcontext()


def load_actor(path, stage=0, **options):
    with scope(stage):
        return load_causal_lm(str(path), FLAG, FP32, **options)


def load_score(path, stage=0, from_base=False, pad_token_id=PAD, num_tokens=0):
    with scope(stage):
        return load_score_backbone(str(path), FLAG, FP32, from_base, pad_token_id, num_tokens)


def edited(tiny, tmp_path, name, edit):
    """A copy of a checkpoint whose state dict went through ``edit``."""
    folder = tmp_path / f"{name}_edited"
    shutil.copytree(tiny(name), folder)
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@STAGES
@pytest.mark.parametrize("name", ["llama", "llama_tied", "opt", "opt_350m", "gpt2", "bloom"])
def test_a_whole_checkpoint_loads(name, stage, tiny):
    zero = ZeroSettings(stage, FP32)
    model = initialize_frozen(load_actor(tiny(name), stage), zero)
    plain = AutoModelForCausalLM.from_pretrained(tiny(name)).eval()
    for row, expected in zip(probe_logprobs(model), probe_logprobs(plain), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


@STAGES
def test_weights_that_are_missing_are_named(stage, tiny, tmp_path):
    def edit(state):
        del state["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(UserError, match=r"lacks 1 weights.*layers.1.mlp.up_proj.weight") as error:
        load_actor(edited(tiny, tmp_path, "llama", edit), stage)
    assert FLAG in str(error.value)


@STAGES
def test_weights_without_a_place_are_named(stage, tiny, tmp_path):
    def edit(state):
        state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)

    with pytest.raises(UserError, match=r"unexpected 1 weights.*layers.7.mlp.up_proj.weight"):
        load_actor(edited(tiny, tmp_path, "llama", edit), stage)


@STAGES
def test_weights_of_another_shape_are_named(stage, tiny, tmp_path):
    def edit(state):
        state["lm_head.weight"] = torch.zeros(VOCAB, 16)

    with pytest.raises(UserError, match="lm_head.weight"):
        load_actor(edited(tiny, tmp_path, "llama", edit), stage)


@STAGES
@pytest.mark.parametrize("name", ["llama_reward", "opt_350m_reward"])
def test_a_reward_model_is_no_actor(name, stage, tiny):
    with pytest.raises(UserError, match="is a reward model, which scores"):
        load_actor(tiny(name), stage)


@STAGES
def test_a_language_model_is_no_critic(stage, tiny):
    with pytest.raises(UserError, match="is not a reward model .*LlamaForCausalLM.*step 2"):
        load_score(tiny("llama"), stage)


@STAGES
@pytest.mark.parametrize("name", ["llama", "llama_tied", "opt", "opt_350m", "gpt2"])
def test_step_2_starts_from_a_language_model(name, stage, tiny):
    """Exactly the score head is new; the rest is the language model's."""
    model = initialize_frozen(
        ScoreModel(load_score(tiny(name), stage, from_base=True)), ZeroSettings(stage, FP32)
    )
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny(name), num_labels=1, pad_token_id=PAD
    ).eval()
    head = unwrap(model).model.score.weight
    if stage == 3:
        base.score.weight.data.copy_(head.ds_tensor[: head.ds_numel].view(head.ds_shape))
    else:
        base.score.weight.data.copy_(head)
    assert probe_scores(model) == pytest.approx(probe_scores(ScoreModel(base)), abs=1e-5)


@STAGES
def test_step_2_finds_other_gaps_all_the_same(stage, tiny, tmp_path):
    def edit(state):
        del state["model.norm.weight"]

    with pytest.raises(UserError, match="lacks 1 weights.*norm.weight"):
        load_score(edited(tiny, tmp_path, "llama", edit), stage, from_base=True)


@STAGES
@pytest.mark.parametrize("name", ["llama_reward", "opt_350m_reward"])
def test_scores_are_those_that_transformers_pools(name, stage, tiny):
    model = initialize_frozen(ScoreModel(load_score(tiny(name), stage)), ZeroSettings(stage, FP32))
    plain = AutoModelForSequenceClassification.from_pretrained(tiny(name)).eval()
    ids, mask = pad_right(PROBES, PAD)
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
    assert probe_scores(model) == pytest.approx(expected.tolist(), abs=1e-5)


@STAGES
def test_a_pad_token_beyond_the_vocabulary_gets_its_row(stage, tiny):
    """What step 2 does where the tokenizer's pad token is EOS and one was added."""
    model = load_score(
        tiny("llama_padeos"), stage, from_base=True, pad_token_id=VOCAB, num_tokens=VOCAB + 1
    )
    weight = model.get_input_embeddings().weight
    assert tuple(getattr(weight, "ds_shape", weight.shape)) == (VOCAB + 1, 32)
    assert (model.config.pad_token_id, model.config.vocab_size) == (VOCAB, VOCAB + 1)


def test_bin_checkpoints_load_and_are_checked(tiny, tmp_path):
    model = causal_lm("llama")
    for stage in (0, 3):
        folder = tmp_path / f"bin{stage}"
        model.config.save_pretrained(folder)
        state = dict(model.state_dict())
        torch.save(state, folder / "pytorch_model.bin")
        assert checkpoint_keys(str(folder), FLAG) == set(state)
        loaded = load_actor(folder, stage)
        assert len(list(loaded.parameters())) == len(list(model.parameters()))
        torch.save(state | {"extra": torch.ones(1)}, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match="unexpected 1 weights.*extra"):
            load_actor(folder, stage)


def test_keys_of_a_sharded_checkpoint(tmp_path):
    model = causal_lm("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert checkpoint_keys(str(tmp_path), FLAG) == set(model.state_dict())


def test_a_lora_adapter_is_not_a_model(tmp_path):
    add_lora(causal_lm("llama"), 2, 0, ["all-linear"], True, "--x").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a LoRA adapter; merge it"):
        load_config(str(tmp_path), FLAG)


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no_such_thing"}'])
def test_a_folder_that_is_no_checkpoint(content, tmp_path):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{FLAG} .*config.json is missing or not one"):
        load_config(str(tmp_path), FLAG)


def test_no_such_model():
    with pytest.raises(UserError, match="no such folder, and no such model on the hub"):
        load_config("nobody/nothing", FLAG)


def test_a_checkpoint_without_weights(tiny, tmp_path):
    causal_lm("llama").config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its weights cannot be read"):
        load_actor(tmp_path)


def test_a_damaged_file_of_weights(tiny, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(tiny("llama"), folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match="its weights cannot be read"):
        load_actor(folder)


def test_dropout_is_set_everywhere(tiny):
    model = load_actor(tiny("opt"), dropout=0.25)
    assert model.config.dropout == model.config.attention_dropout == 0.25
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates <= {0.25}
    set_dropout(model.config, 0.0)
    assert model.config.layerdrop == 0.0
    assert load_actor(tiny("gpt2"), dropout=0.0).transformer.drop.p == 0.0


def test_two_labels_are_not_a_score(tmp_path):
    model = score_model("llama")
    model.config.num_labels = 2
    type(model)(model.config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="score.weight"):
        load_score(tmp_path)


def test_eos_is_not_dropped_from_the_padding_question(tiny):
    """A pad id equal to EOS is kept where the caller says so: nothing is compared with it."""
    assert load_score(tiny("llama_reward"), pad_token_id=EOS).config.pad_token_id == EOS
