"""Results of transformers' own forward, row by row, to compare packed rows with; tiny models."""

import families
import pytest
import tiny_models
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    NemotronConfig,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
)

from dschat.models.heads import LanguageModel
from dschat.models.packing import pack

# Prompts that two, three and no rows share; one token; a prompt without an answer; answers longer
# than the windows of all families here.
ROWS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 9, 20, 21],
    [3],
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [30, 31, 32, 33, 34, 35, 36, 37],
    [40],
    [50, 51, 52],
    [50, 51, 53, 54, 55, 56, 57, 58, 59],
]
PROMPTS = [5, 5, 1, 5, 8, 0, 2, 2]
TEMPERATURE = 0.7
_SIZES = tiny_models.IDS | tiny_models.SMALL | {"num_key_value_heads": 1, "head_dim": 16}
_SIZES |= {"intermediate_size": 48}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {
    "cohere": lambda: CohereConfig(**_SIZES, logit_scale=0.25),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **tiny_models.OTHERS["recurrent_gemma"]().to_diff_dict() | {"logits_soft_cap": 2.0}
    ),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, attn_logit_softcapping=2.0, final_logit_softcapping=2.0, sliding_window=4
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        final_logit_softcapping=2.0,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llama4": lambda: Llama4TextConfig(  # scales queries by positions from 5 on
        **_SIZES,
        **{k: v for k, v in _EXPERTS.items() if k != "moe_intermediate_size"},
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        floor_scale=5,
        attn_scale=0.8,
    ),
    "nemotron": lambda: NemotronConfig(**_SIZES),
    "deepseek": lambda: DeepseekV3Config(
        **{k: v for k, v in _SIZES.items() if k not in ("head_dim", "num_key_value_heads")},
        **_EXPERTS,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{k: v for k, v in _SIZES.items() if k != "head_dim"},
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=0,
    ),
}
LIBRARY = {f"tiny_{name}": made for name, made in tiny_models.OTHERS.items()}
CONFIGS = families.CONFIGS | LIBRARY | OTHERS
# Families whose rows are padded, with the reason that a log line gives.
PADDED = {
    "bloom": "attention is eager",
    "bloom_residual_after_norm": "attention is eager",
    "tiny_gpt_neo": "attention is eager",
}
FULL_LOGITS = (
    "tiny_recurrent_gemma",
    "recurrent_gemma",
    "gemma2",
    "gemma3",
    "cohere",
    "cohere2",
    "granite",
    "granitemoe",
    "minicpm3",
    "nanochat",
)


def build(name):
    """A tiny model of ``CONFIGS[name]``; biases and norms are drawn, so that a lost one shows."""
    if name == "gemma2" and Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers gives it an attention that ignores the bound of its scores")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        return tiny_models.randomized(model)


def checked(model, packing="auto", wrap=LanguageModel):
    """``model`` wrapped, after the check that an engine makes."""
    wrapped = wrap(model, packing)
    wrapped.check(torch.device("cpu"))
    return wrapped


def runs_head_alone(wrapped):
    """Whether its head keeps no logits: the model that has it does not run as a whole."""
    runs = []
    hook = wrapped.base.register_forward_hook(lambda *_: runs.append("whole"))
    with torch.no_grad():
        wrapped(rows_of())
    hook.remove()
    return not runs


def rows_of(ids=ROWS, prompts=PROMPTS):
    """Reading every column that has a next token."""
    return pack(ids, [range(len(row) - 1) for row in ids], prompts)


def own(model):
    """Log-probs and entropies of ``ROWS`` by transformers' own forward of each row."""
    logprobs, entropies = [], []
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(1, torch.tensor(row[1:]).long().unsqueeze(1))[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(module, *values):
    """Of a sum with a weight for every value, by names without ``PackedModel``'s."""
    module.zero_grad()
    sum((v * torch.linspace(-1, 2, len(v))).sum() for v in values).backward()
    named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in named.items()}


def assert_close(actual, expected, tolerance=1e-5):
    gap, scale = (actual - expected).abs().max(), expected.abs().max()
    assert gap <= tolerance * float(scale), f"{float(gap):.2g} of {float(scale):.2g}"


def assert_same_gradients(ours, theirs, tolerance=2e-5):
    """Each relative to its own largest, or to a tenth of the largest of all: those of the keys'
    biases are roundings of 0.
    """
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, grad in theirs.items():
        gap, scale = (ours[name] - grad).abs().max(), max(float(grad.abs().max()), largest / 10)
        assert gap <= tolerance * scale, f"{name}: {float(gap):.2g} of {scale:.2g}"


def assert_same(wrapped, model, tolerance=2e-5):
    """The wrapped model's results and gradients are those of ``model`` by its own forward."""
    expected = own(model)
    theirs = gradients(model, *expected)
    results = wrapped(rows_of(), TEMPERATURE, True)
    for actual, reference in zip(results, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual.detach(), reference.detach())
    assert_same_gradients(gradients(wrapped.model, *results), theirs, tolerance)
    assert wrapped(rows_of(), TEMPERATURE)[1] is None
