"""DeepSpeed-Chat's reward models: loading, errors, and scores against hidden states @ v_head."""

import json
from contextlib import nullcontext

import pytest
import torch
from quick import each_once
from step_cases import probe_scores
from step_rows import PROBES
from tiny_models import CONFIGS, PAD, tokenizer
from transformers import AutoModel

from dschat.config import UserError
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import ScoreModel
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading

FLAG, FP32 = "--critic_model_name_or_path", torch.float32
STAGES = pytest.mark.parametrize("stage", [0, 3])


def legacy_folder(folder, name, prefix="rwtransformer", extra=None):
    """Writes a reward model as DeepSpeed-Chat's ``save_hf_format`` does; returns its parts."""
    torch.manual_seed(3)
    base = AutoModel.from_config(CONFIGS[name]()).eval()
    width = getattr(base.config, "word_embed_proj_dim", base.config.hidden_size)
    head = torch.nn.Linear(width, 1, bias=False)
    state = {f"{prefix}.{k}": v for k, v in base.state_dict().items()}
    folder.mkdir()
    torch.save(
        {"v_head.weight": head.weight.detach()} | state | (extra or {}),
        folder / "pytorch_model.bin",
    )
    causal = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bloom": "BloomForCausalLM"}
    base.config.architectures = [causal.get(name, "OPTForCausalLM")]
    base.config.n_embd = width  # it adds such keys
    base.config.to_json_file(folder / "config.json")
    return base, head


def load(folder, stage, from_base=False):
    zero = ZeroSettings(stage, FP32)
    with sharded_loading(zero) if stage == 3 else nullcontext():
        model = Checkpoint(folder, FLAG).score_model(FP32, PAD, from_base=from_base)
    return initialize_frozen(ScoreModel(model), zero)


@pytest.mark.parametrize(
    ("name", "prefix", "stage"),
    each_once(
        ["opt", "opt_350m", "llama", "gpt2", "bloom"], ["rwtransformer", "rwtranrsformer"], [0, 3]
    ),
)
def test_scores_are_hidden_states_times_the_head(name, prefix, stage, tmp_path):
    folder = tmp_path / "reward"
    base, head = legacy_folder(folder, name, prefix)
    assert Checkpoint(folder, FLAG).reward_form == "v_head"
    with torch.no_grad():
        expected = [
            float(head(base(torch.tensor([ids])).last_hidden_state)[0, -1]) for ids in PROBES
        ]
    assert len({round(score, 3) for score in expected}) == len(PROBES)
    before = sorted(p.name for p in folder.iterdir())
    assert probe_scores(load(folder, stage)) == pytest.approx(expected, abs=1e-5)
    assert sorted(p.name for p in folder.iterdir()) == before, "converted in memory"


@STAGES
def test_step_2_may_start_from_one(stage, tmp_path):
    legacy_folder(tmp_path / "reward", "opt")
    once = probe_scores(load(tmp_path / "reward", stage))
    assert probe_scores(load(tmp_path / "reward", stage, from_base=True)) == once


@STAGES
def test_missing_and_unexpected_weights_are_named(stage, tmp_path):
    legacy_folder(tmp_path / "more", "opt", extra={"rwtransformer.decoder.other": torch.ones(1)})
    with pytest.raises(UserError, match="unexpected 1 weights.*model.decoder.other"):
        load(tmp_path / "more", stage)
    base, _ = legacy_folder(tmp_path / "less", "opt")
    file = tmp_path / "less" / "pytorch_model.bin"
    state = torch.load(file)
    del state["rwtransformer.decoder.layers.1.fc1.weight"]
    torch.save(state, file)
    with pytest.raises(UserError, match="lacks 1 weights.*layers.1.fc1.weight"):
        load(tmp_path / "less", stage)


def test_it_is_not_an_actor(tmp_path):
    legacy_folder(tmp_path / "reward", "opt")
    with pytest.raises(UserError, match="is a reward model, which scores"):
        Checkpoint(tmp_path / "reward", FLAG).language_model(FP32)


def test_a_bare_vocabulary_loads_the_base_models_tokenizer(tmp_path):
    """DeepSpeed-Chat saved vocab files without special tokens; config.json names the base model."""
    legacy_folder(tmp_path / "reward", "opt")
    file = tmp_path / "reward" / "config.json"
    tokenizer().save_pretrained(tmp_path / "origin")
    (tmp_path / "reward" / "vocab.json").write_text("{}")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"_name_or_path": str(tmp_path / "origin")}))
    assert load_tokenizer(str(tmp_path / "reward"), FLAG).get_vocab() == tokenizer().get_vocab()
    file.write_text(json.dumps(config | {"_name_or_path": "nobody/origin"}))
    with pytest.raises(UserError, match="it has only a vocabulary.*nobody/origin.*copy that"):
        load_tokenizer(str(tmp_path / "reward"), FLAG)
