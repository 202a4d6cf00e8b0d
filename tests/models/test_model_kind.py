"""Checkpoints refused by their configuration and file headers: one line, before weights load."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tiny_models import PAD, causal_lm, score_model, tokenizer
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    Gemma3Config,
    GPT2Model,
    LlamaModel,
    T5Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat.config import UserError
from dschat.models.checkpoint import Checkpoint
from dschat.models.lora import add_lora
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.deepspeed_engine import ZeroSettings, sharded_loading

FLAG = "--model_name_or_path"
FP32 = torch.float32


def only_config(folder, config, **changes):
    """A folder with only a config.json: an attempt to read weights would raise another error."""
    config.save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def refusal(call, *args):
    with pytest.raises(UserError) as error:
        call(*args)
    assert str(error.value).startswith(f"{FLAG} {args[0] if args else ''}")
    assert "\n" not in str(error.value)
    return str(error.value)


def load_actor(path):
    return Checkpoint(path, FLAG).language_model(FP32)


def load_score(path, from_base=False):
    return Checkpoint(path, FLAG).score_model(FP32, PAD, from_base=from_base)


BERT = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
)
T5 = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)


def test_a_field_of_the_text_part_is_of_the_wrong_type(tmp_path):
    path = only_config(tmp_path, Gemma3Config(), tie_word_embeddings=None)
    assert "config.json cannot be used" in refusal(load_actor, path)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (BERT, "BertForMaskedLM"),
        (BERT, "BertLMHeadModel"),
        (BERT, None),
        (T5, "T5ForConditionalGeneration"),
        (None, "LlamaForTokenClassification"),
    ],
)
def test_an_actor_must_be_a_causal_lm(config, architecture, tmp_path):
    config = config or causal_lm("llama").config
    path = only_config(tmp_path, config, architectures=[architecture] if architecture else None)
    shown = architecture or "BertConfig"
    assert f"is a {shown}; name a causal LM" in refusal(load_actor, path)


@pytest.mark.parametrize(
    ("config", "architecture", "named"),
    [
        (BERT, "BertModel", "BertForSequenceClassification"),
        (T5, "T5Model", "T5ForSequenceClassification"),
    ],
)
def test_a_reward_model_needs_a_score_for_every_token(config, architecture, named, tmp_path):
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)

    def check(path):
        Checkpoint(path, FLAG).check("score")

    path = str(tmp_path)
    assert f"{named} has no per-token score head" in refusal(check, path)


def test_a_model_without_head_is_an_actor_where_the_head_is_tied(tmp_path):
    GPT2Model(causal_lm("gpt2").config).save_pretrained(tmp_path / "tied")
    assert load_actor(str(tmp_path / "tied"))
    LlamaModel(causal_lm("llama").config).save_pretrained(tmp_path / "untied")
    assert "lacks 1 weights" in refusal(load_actor, str(tmp_path / "untied"))


def test_a_reward_model_is_not_an_actor(tmp_path):
    config = score_model("llama").config
    path = only_config(tmp_path, config, architectures=["LlamaForSequenceClassification"])
    assert "is a reward model, which scores" in refusal(load_actor, path)


def test_quantized_checkpoints_are_refused(tmp_path):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path = only_config(tmp_path, causal_lm("llama").config, quantization_config=quantization)
    assert "is quantized (bitsandbytes)" in refusal(load_actor, path)
    with pytest.raises(UserError, match="name the checkpoint it was made from.*--load_in_4bit"):
        Checkpoint(path, FLAG).check("lm", weight_bits=4)


def test_an_adapter_names_its_merged_model_or_the_way_to_it(tmp_path):
    wrapped = add_lora(causal_lm("llama"), 2, 0, ["all-linear"], True, "--x")
    wrapped.peft_config["default"].base_model_name_or_path = "some/base"
    wrapped.save_pretrained(tmp_path / "adapter")
    alone = refusal(load_actor, str(tmp_path / "adapter"))
    assert "is a LoRA adapter; merge it into some/base first" in alone
    only_config(tmp_path, causal_lm("llama").config)
    beside = refusal(load_actor, str(tmp_path / "adapter"))
    assert f"is a LoRA adapter; name {tmp_path}, which holds the merged model" in beside


# -- code ------------------------------------------------------------------------------------------


class Malicious:
    """Creates a folder when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reward", [False, True])
def test_code_in_a_bin_is_refused_and_never_runs(reward, stage, tmp_path):
    model, folder, mark = causal_lm("llama"), tmp_path / "model", tmp_path / "ran"
    path = only_config(folder, model.config, architectures=["LlamaForCausalLM"])
    torch.save(dict(model.state_dict()) | {"x": Malicious(mark)}, folder / "pytorch_model.bin")
    scope = sharded_loading(ZeroSettings(3, FP32)) if stage == 3 else nullcontext()
    with scope:
        error = refusal(load_score if reward else load_actor, path)
    assert "holds more than tensors and would run code" in error
    assert "which is refused" in error
    assert not mark.exists()
    with pytest.raises(UserError, match="which is refused"):
        _ = Checkpoint(path, FLAG).keys
    assert not mark.exists()


def with_code(folder, mark):
    """A checkpoint whose architecture is defined by its own Python file."""
    code = (
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_thing'\n"
        "class OwnLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = causal_lm("llama").config
    causal_lm("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(code)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"}
    return only_config(
        folder, config, model_type="own_thing", auto_map=auto, architectures=["OwnLM"]
    )


def test_code_beside_a_checkpoint_runs_only_where_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    path = with_code(tmp_path / "model", mark)
    assert "needs its own Python code" in (error := refusal(load_actor, path))
    assert "--trust_remote_code" in error
    assert not mark.exists()
    model = Checkpoint(path, FLAG, trust_remote_code=True).language_model(FP32)
    assert mark.exists()
    assert type(model).__name__ == "OwnLM"


def test_code_of_a_tokenizer_runs_only_where_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    path = with_code(tmp_path / "model", mark)
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    }
    file.write_text(json.dumps(settings))
    causal_lm("llama").config.save_pretrained(path)  # only the tokenizer has code
    with pytest.raises(UserError) as error:
        load_tokenizer(path, FLAG)
    assert "--trust_remote_code" in str(error.value)
    assert not mark.exists()


@pytest.mark.slow
def test_no_configuration_of_transformers_own_is_refused(tmp_path):
    read = 0
    for kind in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} & {*CONFIG_MAPPING}:
        try:
            config = CONFIG_MAPPING[kind]()
            text = config.get_text_config()
        except (ValueError, StrictDataclassError):  # it has no defaults, or is not for text alone
            continue
        config.save_pretrained(tmp_path / kind)
        read_as = type(Checkpoint(tmp_path / kind, FLAG).config)
        assert read_as in (type(config), type(text))  # the text part of a model that also sees
        read += 1
    assert read > 100
