"""Loaded models as the start of a run, and with its result."""

import copy
import os
import shutil

import forked
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)

from dschat import DPOTrainer, GRPOTrainer, SFTTrainer
from dschat.builtin.tiny_model import resolve_model
from dschat.config import RewardConfig, SFTConfig, UserError
from dschat.runtime import loaded_model
from dschat.runtime.loaded_model import LoadedModel

PAIRS = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(24)]
# Two runs from one model, of which the second is interrupted and resumes.
SCRIPT = f"""
import torch
from transformers import AutoModelForCausalLM
from dschat import DPOTrainer, UserError
from dschat.builtin.tiny_model import resolve_model

pairs = {PAIRS!r}
settings = dict(max_steps=3, save_steps=1, data_split="0,1,0", learning_rate=1e-3)
settings |= dict(per_device_train_batch_size=4)
tiny = str(resolve_model("builtin/tiny"))
DPOTrainer(tiny, pairs, output_dir="named", **settings).train()


class Interrupt:
    def on_step(self, engine, metrics):
        assert engine.global_steps < 2


model = AutoModelForCausalLM.from_pretrained(tiny).train()
trainer = DPOTrainer(model, pairs, callbacks=[Interrupt()], output_dir="loaded", **settings)
try:
    trainer.train()
except UserError:
    pass
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
pointer = model.lm_head.weight.data_ptr()
DPOTrainer(model, list(pairs), output_dir="loaded", resume="latest", **settings).train()
assert model.training and model.lm_head.weight.data_ptr() == pointer
model.save_pretrained("held")
"""


@pytest.fixture(scope="module")
def tiny():
    return str(resolve_model("builtin/tiny"))


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny)


@pytest.fixture
def score_model(tiny):
    return lambda n: AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=n)


@pytest.mark.slow
def test_a_loaded_model_trains_as_its_folder_does(tmp_path):
    """To the bit: an interrupted run and its reference begin where the first one did."""
    done = forked.run("-c", SCRIPT, cwd=str(tmp_path), limit_s=200)
    assert done.code == 0, done.stderr[-3000:]
    assert "resum" in done.stderr
    named, loaded, held = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("named/actor", "loaded/actor", "held")
    )
    for other in (loaded, held):
        assert other.keys() == named.keys()
        assert all(np.array_equal(other[key], named[key]) for key in named)


def test_a_trainer_names_the_folder(model):
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    for name in ("processing_class", "tokenizer"):
        config = DPOTrainer(model, output_dir="o", **{name: tokenizer}).config
        assert config.model_name_or_path == os.path.abspath("o/initial_model")
    for trainer, folder in ((SFTTrainer, "step1_sft"), (DPOTrainer, "step3_rlhf")):
        path = os.path.abspath(f"output/{folder}/initial_model")
        assert trainer(model).config.model_name_or_path == path
    config = GRPOTrainer(model, reward_fns=len).config
    assert config.actor_model_name_or_path == config.critic_model_name_or_path == path


def test_writes_model_and_tokenizer_once(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    tokenizer.add_tokens(["<other>"])
    config = SFTConfig(output_dir=str(tmp_path))
    loaded = LoadedModel(model, tokenizer, config)
    for _ in range(2):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        loaded.write(config)
        written = AutoModelForCausalLM.from_pretrained(loaded.folder)
        assert torch.equal(written.lm_head.weight, model.lm_head.weight)
    assert "<other>" in AutoTokenizer.from_pretrained(loaded.folder).get_vocab()

    # The model of a run that was finished stays, unless the run is replaced.
    (tmp_path / "COMPLETE").touch()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    loaded.write(config)
    kept = AutoModelForCausalLM.from_pretrained(loaded.folder).lm_head.weight
    assert torch.equal(kept, written.lm_head.weight)
    shutil.rmtree(loaded.folder)  # of a run that had named its model
    loaded.write(config)
    assert os.path.isdir(loaded.folder)
    with torch.no_grad():
        model.lm_head.weight.fill_(1)
    loaded.write(SFTConfig(output_dir=str(tmp_path), overwrite_output_dir=True))
    assert (AutoModelForCausalLM.from_pretrained(loaded.folder).lm_head.weight == 1).all()


def test_holds_the_trained_weights(model, tmp_path):
    """In its own precision, with the tokens that the run added, of which one ends answers."""
    trained = copy.deepcopy(model)
    trained.resize_token_embeddings(trained.config.vocab_size + 3)
    trained.generation_config.eos_token_id = [1, 7]
    trained.save_pretrained(tmp_path / "actor")
    config = RewardConfig(output_dir=str(tmp_path), loss="dpo")
    LoadedModel(model.bfloat16(), None, config).fill(config)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight.bfloat16())
    assert model.generation_config.eos_token_id == [1, 7]


def test_other_models_are_refused(model, score_model, monkeypatch):
    sft, reward = SFTConfig(), RewardConfig()

    def refuses(given, config, words, tokenizer=None):
        with pytest.raises(UserError, match=words):
            LoadedModel(given, tokenizer, config)

    LoadedModel(score_model(1), None, reward)
    refuses(score_model(1), sft, "LlamaForSequenceClassification; give a causal LM")
    refuses(score_model(2), reward, "with num_labels=1")
    refuses(model, reward, "LlamaForCausalLM; load AutoModelForSequenceClassification")
    bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    refuses(bert, sft, "BertModel; give a causal LM")
    refuses(3, sft, "model is a int; give a folder")
    refuses(model, sft, "processing_class is a str", "tokenizer")
    refuses(AutoModelForCausalLM.from_config(model.config).to("meta"), sft, "offloaded weights")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    for each in (adapted, adapted.get_base_model()):
        refuses(each, sft, "with adapters; give model.merge_and_unload")
    LoadedModel(adapted.merge_and_unload(), None, sft)
    with monkeypatch.context() as patch:
        patch.setattr(loaded_model, "world_size", lambda: 2)
        refuses(model, sft, "each of 2 processes has one")
    model.is_quantized = True  # as transformers marks them
    refuses(model, sft, "quantized weights; name it")


def test_a_model_without_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"give processing_class; {tmp_path}: no tokenizer"):
        LoadedModel(alone, None, SFTConfig())
    LoadedModel(alone, AutoTokenizer.from_pretrained(model.name_or_path), SFTConfig())
