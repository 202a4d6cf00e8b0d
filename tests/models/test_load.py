"""Loading: exactly the checkpoint's weights, or a one-line error; with ZeRO-3 too."""

import json
import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
from quick import each_once
from safetensors.torch import load_file, save_file
from step_cases import probe_logprobs, probe_scores
from step_rows import PROBES, padded_probes
from tiny_models import (
    CONFIGS,
    EOS,
    IDS,
    PAD,
    SMALL,
    VOCAB,
    causal_lm,
    score_model,
    tokenizer,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from dschat.config import UserError
from dschat.inference import InferenceEngine
from dschat.inference.protocol import SamplingParams
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import ScoreModel
from dschat.models.load import set_dropout
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading, unwrap

FP32 = torch.float32
FLAG = "--model_name_or_path"
STAGES = pytest.mark.parametrize("stage", [0, 3])


def scope(stage):
    return sharded_loading(ZeroSettings(3, FP32)) if stage == 3 else nullcontext()


def load_actor(path, stage=0, **options):
    with scope(stage):
        return Checkpoint(path, FLAG).language_model(FP32, **options)


def load_score(path, stage=0, from_base=False, pad_token_id=PAD, num_tokens=0):
    with scope(stage):
        return Checkpoint(path, FLAG).score_model(
            FP32, pad_token_id, from_base, num_tokens=num_tokens
        )


def frozen(model, stage):
    return initialize_frozen(model, ZeroSettings(stage, FP32))


def assert_alike(model, plain):
    for row, expected in zip(probe_logprobs(model), probe_logprobs(plain), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


def edited(tiny, tmp_path, name, edit):
    """A copy of a checkpoint with ``edit`` applied to its state dict."""
    folder = tmp_path / f"{name}_edited"
    shutil.copytree(tiny(name), folder)
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "stage"),
    each_once(["llama", "llama_tied", "opt", "opt_350m", "gpt2", "bloom"], [0, 3]),
)
def test_a_whole_checkpoint_loads(name, stage, tiny):
    model = frozen(load_actor(tiny(name), stage), stage)
    plain = AutoModelForCausalLM.from_pretrained(tiny(name)).eval()
    assert_alike(model, plain)


@STAGES
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_stored_head_that_differs_from_the_embedding_is_not_tied(name, stage, tiny, tmp_path):
    """transformers does not tie such a pair, whatever the configuration says."""
    embedding = {"gpt2": "transformer.wte.weight"}.get(name, "model.embed_tokens.weight")
    folder = edited(
        tiny, tmp_path, name, lambda state: state.update({"lm_head.weight": -state[embedding]})
    )
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not torch.equal(plain.lm_head.weight, plain.get_input_embeddings().weight)
    model = load_actor(folder, stage)
    assert not model.config.tie_word_embeddings
    assert_alike(frozen(model, stage), plain)
    engine = InferenceEngine.from_pretrained(folder, max_num_seqs=1, max_seq_len=32)
    (out,) = engine.generate([PROBES[0]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    ids = torch.tensor([[*PROBES[0], *out.token_ids]])
    logits = plain(ids).logits[0, len(PROBES[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
    assert out.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


# Constants in old checkpoints: Llama 2, Pythia, distilgpt2 (whose names lack the prefix).
CONSTANTS = {
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "gpt_neox": {
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(4),
        "gpt_neox.layers.1.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
    },
    "gpt2": {
        "h.1.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
        "position_ids": torch.arange(4),
    },
}


@pytest.mark.parametrize(("name", "shards", "stage"), each_once(CONSTANTS, [False, True], [0, 3]))
def test_constants_of_old_checkpoints_are_ignored(name, shards, stage, tmp_path):
    plain = causal_lm(name)
    plain.config.save_pretrained(tmp_path)
    prefix = "transformer." if name == "gpt2" else ""
    state = {key.removeprefix(prefix): tensor.clone() for key, tensor in named_weights(plain)}
    if not shards:
        file = tmp_path / "model.safetensors"
        save_file(state | CONSTANTS[name], file, metadata={"format": "pt"})
    else:
        parts = {"a.bin": state, "b.bin": CONSTANTS[name]}
        for file, part in parts.items():
            torch.save(part, tmp_path / file)
        index = {key: file for file, part in parts.items() for key in part}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    Checkpoint(tmp_path, FLAG).check("lm")
    assert_alike(frozen(load_actor(tmp_path, stage), stage), plain)
    engine = InferenceEngine.from_pretrained(tmp_path)
    rollout = engine.generate([PROBES[0][:2]], SamplingParams(max_new_tokens=1, temperature=0))
    assert rollout.logprobs[0][0] == pytest.approx(max_logprob(plain, PROBES[0][:2]), abs=1e-5)


def named_weights(model):
    """Names on disk (GPT-NeoX's head is embed_out there) and weights; a tied head once."""
    for name, parameter in model.named_parameters():
        on_disk = "embed_out.weight" if "gpt_neox" in str(type(model)) else "lm_head.weight"
        yield (on_disk if name == "lm_head.weight" else name), parameter.detach()


@torch.no_grad()
def max_logprob(model, ids):
    return float(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max())


UP = "model.layers.1.mlp.up_proj.weight"


@STAGES
@pytest.mark.parametrize(
    ("change", "from_base", "message"),
    [
        (lambda state: state.pop(UP), None, f"lacks 1 weights.*{UP}"),
        (lambda state: state.update(x=torch.zeros(2)), None, "unexpected 1 weights.*x"),
        (lambda state: state.update({UP: torch.zeros(VOCAB, 16)}), None, UP),
        (lambda state: state.pop("model.norm.weight"), True, "lacks 1 weights.*norm.weight"),
    ],
    ids=["missing", "unexpected", "of another shape", "missing in step 2"],
)
def test_weights_that_do_not_fit_are_named(change, from_base, message, stage, tiny, tmp_path):
    folder = edited(tiny, tmp_path, "llama", change)
    with pytest.raises(UserError, match=f"^{FLAG} .*{message}"):
        load_score(folder, stage, from_base) if from_base else load_actor(folder, stage)


@STAGES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(value, stage, tiny, tmp_path):
    def edit(state):
        state["score.weight"][0, -1] = value

    with pytest.raises(UserError, match=r"NaN or infinite .* in 1 weights, such as score.weight"):
        load_score(edited(tiny, tmp_path, "llama_reward", edit), stage)


def test_weights_beyond_fp16_are_named(tiny, tmp_path):
    """Finite on disk, infinite in the dtype of training."""

    def edit(state):
        state["lm_head.weight"][0, 0] = 1e5

    folder = str(edited(tiny, tmp_path, "llama", edit))
    with pytest.raises(UserError, match=r"NaN or infinite \(in float16\) .* lm_head.weight"):
        Checkpoint(folder, FLAG).language_model(torch.float16)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integer_weights_are_refused(dtype, form, tmp_path):
    model = causal_lm("llama")
    model.config.save_pretrained(tmp_path)
    state = {k: v.to(dtype) if "up_proj" in k else v for k, v in model.state_dict().items()}
    if form == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=rf"^{FLAG} .* stores 2 weights as integers, .*0.mlp.up_proj"
    ):
        Checkpoint(tmp_path, FLAG).check("lm")
    with pytest.raises(UserError, match=r"up_proj.weight is stored as \w+, not in floating point"):
        InferenceEngine.from_pretrained(tmp_path)


def test_bounded_scores_are_not_left_to_sdpa(tmp_path):
    """transformers 5.17 would, and its sdpa ignores the bound."""
    config = AutoConfig.for_model("gemma2", **IDS | SMALL, num_key_value_heads=1, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert load_actor(tmp_path).config._attn_implementation == "eager"


@STAGES
def test_a_causal_lm_is_not_a_critic(stage, tiny):
    with pytest.raises(UserError, match="is not a reward model .*LlamaForCausalLM.*step 2"):
        load_score(tiny("llama"), stage)


@pytest.mark.parametrize(
    ("name", "stage"), each_once(["llama", "llama_tied", "opt", "opt_350m", "gpt2"], [0, 3])
)
def test_step_2_starts_from_a_causal_lm(name, stage, tiny):
    """Only the score head is new; all other weights are the causal LM's."""
    model = frozen(ScoreModel(load_score(tiny(name), stage, from_base=True)), stage)
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny(name), num_labels=1, pad_token_id=PAD
    ).eval()
    head = unwrap(model).score.weight
    if stage == 3:
        base.score.weight.data.copy_(head.ds_tensor[: head.ds_numel].view(head.ds_shape))
    else:
        base.score.weight.data.copy_(head)
    assert probe_scores(model) == pytest.approx(probe_scores(ScoreModel(base)), abs=1e-5)


def test_a_new_score_head_is_no_news(tiny):
    """transformers' table of missing and unexpected weights would show up in a notebook."""
    logger, records = logging.getLogger("transformers"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        load_score(tiny("llama"), 0, from_base=True)
    finally:
        logger.removeHandler(handler)
    assert records == []


@STAGES
@pytest.mark.parametrize("name", ["llama_reward", "opt_350m_reward"])
def test_scores_are_those_that_transformers_pools(name, stage, tiny):
    model = frozen(ScoreModel(load_score(tiny(name), stage)), stage)
    plain = AutoModelForSequenceClassification.from_pretrained(tiny(name)).eval()
    ids, mask = padded_probes(PAD)
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
    assert probe_scores(model) == pytest.approx(expected.tolist(), abs=1e-5)


@STAGES
def test_a_pad_token_beyond_the_vocabulary_gets_its_row(stage, tiny):
    """Step 2 adds a pad token if the tokenizer's is EOS."""
    model = load_score(
        tiny("llama_padeos"), stage, from_base=True, pad_token_id=VOCAB, num_tokens=VOCAB + 1
    )
    weight = model.get_input_embeddings().weight
    assert tuple(getattr(weight, "ds_shape", weight.shape)) == (VOCAB + 1, 32)
    assert (model.config.pad_token_id, model.config.vocab_size) == (VOCAB, VOCAB + 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ('{"model_type": "no_such_thing"}', "no_such_thing"),
        ("{}", "model_type is null"),
    ],
)
def test_a_folder_that_is_not_a_checkpoint(content, reason, tmp_path):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{FLAG} .*config.json .*{reason}"):
        _ = Checkpoint(tmp_path, FLAG).config


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
    """A pad id equal to EOS is kept if the caller passes it: nothing compares ids with it."""
    assert load_score(tiny("llama_reward"), pad_token_id=EOS).config.pad_token_id == EOS


# -- reward models of DeepSpeed-Chat ---------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "prefix", "stage"),
    each_once(
        ["opt", "opt_350m", "llama", "gpt2", "bloom"], ["rwtransformer", "rwtranrsformer"], [0, 3]
    ),
)
def test_legacy_scores_are_hidden_states_times_the_head(name, prefix, stage, tmp_path):
    folder = tmp_path / "reward"
    base, head = legacy_folder(folder, name, prefix)
    assert Checkpoint(folder, FLAG).reward_form == "v_head"
    with torch.no_grad():
        expected = [
            float(head(base(torch.tensor([ids])).last_hidden_state)[0, -1]) for ids in PROBES
        ]
    assert len({round(score, 3) for score in expected}) == len(PROBES)
    before = sorted(p.name for p in folder.iterdir())
    assert probe_scores(frozen(ScoreModel(load_score(folder, stage)), stage)) == pytest.approx(
        expected, abs=1e-5
    )
    assert sorted(p.name for p in folder.iterdir()) == before, "converted in memory"


@STAGES
def test_step_2_may_start_from_a_legacy_reward_model(stage, tmp_path):
    legacy_folder(tmp_path / "reward", "opt")
    once, again = (load_score(tmp_path / "reward", stage, from_base) for from_base in (False, True))
    scores = [probe_scores(frozen(ScoreModel(model), stage)) for model in (once, again)]
    assert scores[0] == scores[1]


@STAGES
def test_missing_and_unexpected_legacy_weights_are_named(stage, tmp_path):
    legacy_folder(tmp_path / "more", "opt", extra={"rwtransformer.decoder.other": torch.ones(1)})
    with pytest.raises(UserError, match="unexpected 1 weights.*model.decoder.other"):
        load_score(tmp_path / "more", stage)
    base, _ = legacy_folder(tmp_path / "less", "opt")
    file = tmp_path / "less" / "pytorch_model.bin"
    state = torch.load(file)
    del state["rwtransformer.decoder.layers.1.fc1.weight"]
    torch.save(state, file)
    with pytest.raises(UserError, match="lacks 1 weights.*layers.1.fc1.weight"):
        load_score(tmp_path / "less", stage)


def test_a_legacy_reward_model_is_not_an_actor(tmp_path):
    legacy_folder(tmp_path / "reward", "opt")
    with pytest.raises(UserError, match="is a reward model, which scores"):
        load_actor(tmp_path / "reward")
