"""Saved models against what the family's own class saves: names, shapes, and what they compute."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from quick import each_once
from safetensors.torch import load_file
from tiny_models import _MOE, EOS, IDS, POSITIONS, causal_lm, tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GPTNeoXConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MixtralConfig,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
)

from dschat.checkpoint.hf_export import export_adapter, export_hf
from dschat.checkpoint.saved_check import SavedModelError, probe_values
from dschat.config import UserError
from dschat.hybrid.weight_stream import adapter_stream, weight_stream
from dschat.inference import InferenceEngine, SamplingParams
from dschat.models import adapter_files
from dschat.models.adapter_files import load_adapter
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.heads import LanguageModel
from dschat.models.lora import adapters, add_lora

CPU, FP32, FLAG = torch.device("cpu"), torch.float32, "--model"
TOKENS = torch.tensor([[3, 7, 11, 2, 40, 9, 8, 33, 21, 5, 6, 17]])
_MIX = _MOE | {"head_dim": 8}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_MOE_BLOCK = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
_MOE_BLOCK |= {"moe_intermediate_size": 16, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
_MOE_BLOCK |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_LINEAR = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "num_hidden_layers": 4},
}
TEXT_ONLY = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_MIX, num_experts=4, moe_intermediate_size=16),
    "mixtral": lambda: MixtralConfig(**_MIX, num_local_experts=4),
    "gpt_neox": lambda: GPTNeoXConfig(
        **IDS,
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 48, "max_position_embeddings": POSITIONS},
    ),
}
WHOLE = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=_MIX | {"sliding_window": 8},
            vision_config=_VISION,
            mm_tokens_per_image=4,
        )
    ),
    "gemma4": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=_MIX | _MOE_BLOCK,
            vision_config=_VISION | {"head_dim": 16, "num_key_value_heads": 2},
        )
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=_MIX | {"model_type": "mistral"},
            vision_config=_VISION | {"model_type": "pixtral", "head_dim": 16},
            tie_word_embeddings=False,
        )
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(
            text_config=_MIX | _LINEAR,
            vision_config={
                **{"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2},
                **{"out_hidden_size": 32, "patch_size": 14},
            },
        )
    ),
}


@pytest.fixture
def checkpoint(tmp_path):
    def make(name):
        torch.manual_seed(0)
        whole = name in WHOLE
        model = WHOLE[name]() if whole else AutoModelForCausalLM.from_config(TEXT_ONLY[name]())
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "processor_config.json").write_text('{"of": "images"}')
        return str(tmp_path / name)

    return make


def tensors(folder):
    return load_file(f"{folder}/model.safetensors")


@torch.no_grad()
def logits_of(*models):
    return [m.eval()(input_ids=TOKENS, use_cache=False).logits for m in models]


def save(folder, model, config, values=None):
    export_hf(folder, weight_stream(model, CPU), model, config, tokenizer(), (EOS,), values)


@pytest.mark.parametrize(("name", "lora"), each_once([*TEXT_ONLY, *WHOLE], [False, True]))
def test_a_saved_model_has_the_names_and_shapes_it_came_with(name, lora, checkpoint, tmp_path):
    path = checkpoint(name)
    config = Checkpoint(path, FLAG).config
    Checkpoint(path, FLAG).require_causal_lm()
    model = Checkpoint(path, FLAG).language_model(FP32)
    if lora:
        model = add_lora(model, 2, 4.0, ["all-linear"], True, FLAG)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not lora or "lora_B" in key:
                parameter += 0.02 * torch.randn_like(parameter)
    values = probe_values(LanguageModel(model, "off"), config)
    save(tmp_path / "out", model, config, values)
    before, after = tensors(path), tensors(tmp_path / "out")
    assert {k: t.shape for k, t in after.items()} == {k: t.shape for k, t in before.items()}
    same = {key for key in after if torch.equal(after[key], before[key])}
    assert len(same) < len(after)
    if name in WHOLE:
        assert {key for key in after if "vision" in key or "visual" in key} <= same
        raw, old = (CheckpointFiles(str(f), FLAG).json(CONFIG) for f in (tmp_path / "out", path))
        assert raw["vision_config"] == old["vision_config"]
        assert raw["architectures"] == old["architectures"]
        assert (tmp_path / "out/processor_config.json").read_text() == '{"of": "images"}'
    auto = AutoModelForImageTextToText if name in WHOLE else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(*logits_of(model, loaded), atol=3e-5, rtol=1e-5)


def test_a_save_that_lost_a_weight_or_changed_one_is_no_save(checkpoint, tmp_path, container):
    path = checkpoint("qwen3_moe")
    config, model = Checkpoint(path, FLAG).config, Checkpoint(path, FLAG).language_model(FP32)
    values = probe_values(LanguageModel(model, "off"), config)

    def lost(name, tensor):
        return tensor[:-1] if "experts.down" in name else tensor  # that of an expert

    def changed(name, tensor):
        return tensor * 1.5 if "v_proj" in name else tensor

    def save_as(broken):
        stream = ((name, broken(name, tensor)) for name, tensor in weight_stream(model, CPU))
        export_hf(tmp_path / "out", stream, model, config, tokenizer(), (EOS,), values)

    for broken, message in ((lost, "mismatched keys"), (changed, "values differ by")):
        with pytest.raises(SavedModelError, match=message):
            save_as(broken)
        assert not (tmp_path / "out").exists()
    container(1000)
    save_as(changed)  # the host cannot hold the saved one too, whose values nobody sees
    with pytest.raises(SavedModelError, match="mismatched keys"):
        save_as(lost)


def test_the_engine_reads_the_text_part(checkpoint):
    path = checkpoint("mistral3")
    engine = InferenceEngine.from_pretrained(path, max_seq_len=32, stop_ids=())
    prompt = [3, 7, 11, 2]
    answer = engine.generate([prompt], SamplingParams(max_new_tokens=8, temperature=0))[0].token_ids
    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(path).eval()
        logits = whole(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma3", "mixtral"])
def test_a_score_head_on_any_backbone(name, checkpoint, tmp_path):
    path = checkpoint(name)
    Checkpoint(path, FLAG).check("score")
    model = Checkpoint(path, FLAG).score_model(FP32, 1, from_base=True, num_tokens=64)
    export_hf(tmp_path / "rm", weight_stream(model, CPU), model, model.config, tokenizer())
    again = Checkpoint(tmp_path / "rm", FLAG).score_model(FP32, 1, num_tokens=64)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm", output_loading_info=True
    )
    assert not any(info.values())
    scores = logits_of(model, again, theirs)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])
    assert set(json.loads((tmp_path / "rm/config.json").read_text())).isdisjoint({"vision_config"})


def adapted(path, kind):
    """A model of the checkpoint with a random adapter, and the class with which others load it."""
    found = Checkpoint(path, FLAG)
    if kind == "lm":
        model, auto = found.language_model(FP32), AutoModelForCausalLM
        auto = AutoModelForImageTextToText if "mistral3" in path else auto
    else:
        model = found.score_model(FP32, 1, from_base=True)
        auto = AutoModelForSequenceClassification
    modules = (
        ["q_proj", "v_proj"] if (kind, "gemma3" in path) == ("score", True) else ["all-linear"]
    )
    model = add_lora(model, 2, 4.0, modules, True, FLAG)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, auto


ADAPTED = [("qwen3_moe", "lm"), ("gemma3", "lm"), ("gemma3", "score")]
ADAPTED += [("gemma4", "lm"), ("mistral3", "lm")]


@pytest.mark.filterwarnings("error:.*adapter keys")
@pytest.mark.parametrize(("name", "kind"), ADAPTED)
def test_an_adapter_is_one_of_what_transformers_loads(name, kind, checkpoint, tmp_path):
    """The composite class too, in which the layers that see have names with the same ends."""
    path = checkpoint(name)
    model, auto = adapted(path, kind)
    export_adapter(tmp_path / "adapter", adapter_stream(model, CPU), model)
    if auto is AutoModelForCausalLM:
        by_peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    else:
        options = {"num_labels": 1} if kind == "score" else {}
        plain = auto.from_pretrained(path, **options)
        by_peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    models = [model, by_peft]
    if kind == "lm":
        models.append(auto.from_pretrained(path))
        models[-1].load_adapter(tmp_path / "adapter")
    for one in models:
        assert sum("lora_A" in key for key, _ in one.named_parameters()) == len(adapters(model))
        if kind == "score":  # of the last token
            one.config.pad_token_id = one.config.get_text_config().pad_token_id = None
    ours, *theirs = logits_of(*models)
    for logits in theirs:
        torch.testing.assert_close(logits, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_old"), [("gemma3", False), ("gemma3", True), ("mistral3", False)]
)
def test_an_adapter_loads_here_as_it_was_saved(name, is_old, checkpoint, tmp_path, monkeypatch):
    """Also one from before names of the composite class; Mistral 3 has none with a score."""
    model, _ = adapted(checkpoint(name), "score")
    with monkeypatch.context() as patch:
        if is_old:
            patch.setattr(adapter_files, "_places", lambda *_: ("", ""))
        export_adapter(tmp_path / "adapter", adapter_stream(model, CPU), model)
    names = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert any("language_model" in key for key in names) == (name == "gemma3" and not is_old)
    again = Checkpoint(tmp_path / name, FLAG).score_model(FP32, 1, from_base=True)
    again = load_adapter(again, tmp_path / "adapter")
    assert torch.equal(*logits_of(model, again))


def test_an_adapter_is_saved_though_its_base_is_gone(checkpoint, tmp_path):
    model, _ = adapted(checkpoint("qwen3_moe"), "lm")
    (tmp_path / "qwen3_moe").rename(tmp_path / "moved")
    export_adapter(tmp_path / "adapter", adapter_stream(model, CPU), model)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(*logits_of(model, loaded), atol=1e-5, rtol=1e-5)


def test_the_rest_of_a_checkpoint_that_is_gone(checkpoint, tmp_path):
    path = checkpoint("gemma3")
    config, model = Checkpoint(path, FLAG).config, Checkpoint(path, FLAG).language_model(FP32)
    (tmp_path / "gemma3").rename(tmp_path / "moved")
    with pytest.raises((UserError, OSError), match="gemma3"):
        save(tmp_path / "out", model, config)


def test_code_of_a_checkpoint_is_saved_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, code = tmp_path / "own", "from transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n"
    code += "class OwnLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    causal_lm("llama").save_pretrained(path)
    (path / "modeling_own.py").write_text(code)
    fields = json.loads((path / "config.json").read_text())
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnLM"}
    fields |= {"model_type": "own_kind", "architectures": ["OwnLM"], "auto_map": auto}
    (path / "config.json").write_text(json.dumps(fields))
    model = Checkpoint(path, FLAG, trust_remote_code=True).language_model(FP32)
    config = Checkpoint(path, FLAG, trust_remote_code=True).config
    save(tmp_path / "out", model, config, probe_values(LanguageModel(model, "off"), config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnLM"
    assert (tmp_path / "out/modeling_own.py").exists()
