"""A step saves an ordinary Hugging Face folder that computes what the training form did.

Log-probs and scores of the training form come from the run itself, under ZeRO and over its
processes; here the folder is loaded with plain transformers (and PEFT), and must give the same.
"""

import pytest
import torch
from peft import PeftModel
from quick import slow
from step_cases import Case, probe_logprobs
from step_rows import padded_probes
from test_same_losses import by_name
from tiny_models import EOS, VOCAB
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

from dschat.models.quantized import finish_loading

LORA = (("lora_dim", 4),)
LORA_BOTH = (("actor_lora_dim", 4), ("critic_lora_dim", 4))
SHARED = (*LORA_BOTH, ("share_base", True))
LORA_4BIT = (*LORA, ("load_in_4bit", ("all",)))
BOTH_4BIT = (*LORA_BOTH, ("load_in_4bit", ("all",)))
# As test_settings.py has it: one run serves both.
OFFLOADED = (("offload", ("optimizer",)), *LORA_BOTH, ("deepspeed_config", "settings.json"))
OFFLOADED += (("align_overflow", True), ("actor_zero_stage", 2), ("critic_zero_stage", 3))
HERE = [
    Case("sft", 0, 8),
    Case("sft", 3, 2),
    Case("reward", 0, 8, model="opt_350m", options=LORA),
    Case("ppo", 0, 8),
]
SLOW_HERE = [
    Case("sft", 2, 8, options=(*LORA, ("load_in_8bit", ("all",)))),
    Case("sft", 0, 8, model="gpt2", options=LORA),
    Case("reward", 3, 8),
    Case("ppo", 0, 8, iterations=1, options=BOTH_4BIT),
    Case("sft", 0, 8, options=LORA_4BIT),
    Case("reward", 0, 8, model="opt_350m", options=LORA_4BIT),
]
TWO = [
    Case("sft", 3, 4, options=LORA),
    Case("reward", 3, 4, model="llama_padeos"),
    Case("ppo", 3, 4, reward="opt_350m_reward_reversed", iterations=1, shares=(8, 0)),
]
SLOW = [
    Case("ppo", 2, 4, iterations=1, options=BOTH_4BIT),
    Case("ppo", 0, 4, iterations=1, options=OFFLOADED),
    Case("ppo", 2, 4, reward="llama_adapted", iterations=1, shares=(3, 5), options=SHARED),
    Case("sft", 3, 4, options=(("eot_token", "<|endoftext|>"),)),
    Case("ppo", 3, 4, iterations=1, options=LORA_BOTH),
    Case("sft", 2, 4, model="opt", options=LORA),
    Case("sft", 3, 4, model="gpt2", options=LORA),
    Case("reward", 3, 4, model="opt_350m", options=LORA),
    Case("reward", 0, 4, model="llama_padeos"),
    Case("reward", 2, 4, model="gpt2"),
    Case("ppo", 2, 4, model="gpt2", reward="opt_350m_reward", options=LORA_BOTH),
    Case("ppo", 3, 4, model="opt", reward="opt_350m_reward"),
    Case("ppo", 0, 4, options=(*LORA_BOTH, ("only_optimize_lora", False))),
    Case("ppo", 1, 4, model="gpt2", reward="gpt2_adapted", options=SHARED),
]


def assert_close(values, expected):
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def assert_logprobs(model, expected):
    for row, expected_row in zip(probe_logprobs(model), expected, strict=True):
        assert_close(row, expected_row)


def whole(auto_class, folder, **options):
    """The model in ``folder``; nothing missing, nothing left over."""
    model, info = auto_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    return model.eval()


@torch.no_grad()
def assert_scores(model, expected):
    """Scores by transformers' own pooling, of a right-padded batch."""
    ids, mask = padded_probes(model.config.pad_token_id)
    logits = model(input_ids=ids, attention_mask=mask.long()).logits
    assert_close(logits.squeeze(-1).tolist(), expected)


def check_saved(case, result, folder):
    if case.step == "reward":
        model = whole(AutoModelForSequenceClassification, folder)
        assert AutoTokenizer.from_pretrained(folder).pad_token_id == model.config.pad_token_id
        assert model.config.pad_token_id not in (None, EOS)
        assert_scores(model, result["probe"])
    elif case.step == "sft":
        assert_logprobs(whole(AutoModelForCausalLM, folder), result["probe"])
        ends = [EOS, VOCAB] if "eot_token" in dict(case.options) else EOS  # one that was added
        assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
    else:
        assert max(result["gap"]) < 1e-5  # between rollout and training
        assert_logprobs(whole(AutoModelForCausalLM, folder / "actor"), result["probe"])
        assert_logprobs(whole(AutoModelForCausalLM, folder / "actor_ema"), result["ema_probe"])
        critic = whole(AutoModelForSequenceClassification, folder / "critic")
        assert critic.config.num_labels == 1
        assert_scores(critic, result["critic_probe"])
    assert not list(folder.glob("**/.*.saving")), "a half-written folder was left behind"


def quantized(options):
    """How PEFT's users load the base of a run with these ``options``."""
    bits = [bits for bits in (4, 8) if options.get(f"load_in_{bits}bit")]
    if not bits:
        return {}
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings |= {f"load_in_{bits[0]}bit": True, "bnb_4bit_compute_dtype": torch.float32}
    return {"quantization_config": BitsAndBytesConfig(**settings)}


def base_of(auto, path, how):
    """As PEFT's users load one; where bitsandbytes' own products are wrong, with ours: of 4 bits on
    some CPUs, where a row is no multiple of 64 weights.
    """
    base = auto.from_pretrained(path, **how)
    if "quantization_config" in how and how["quantization_config"].load_in_4bit:
        finish_loading(base, torch.float32)
    return base


def check_adapters(case, result, folder, models):
    options = dict(case.options)
    how = quantized(options)
    if case.step == "ppo":
        kept = bool(options.get("actor_lora_dim")) and options.get("only_optimize_lora", True)
        assert (folder / "actor" / "adapter").exists() == kept
        if not kept:
            return
        base = base_of(AutoModelForCausalLM, models / case.model, how)
        with_adapter = PeftModel.from_pretrained(base, folder / "actor" / "adapter").eval()
        assert_logprobs(with_adapter, result["probe"])
        with with_adapter.disable_adapter():
            assert_logprobs(with_adapter, result["ref_probe"])
        of_critic = case.model if options.get("share_base") else case.reward
        how |= {"num_labels": 1}
        base = base_of(AutoModelForSequenceClassification, models / of_critic, how)
        critic = PeftModel.from_pretrained(base, folder / "critic" / "adapter").eval()
        assert_scores(critic, result["critic_probe"])
    elif case.step == "sft" and "lora_dim" in options:
        base = base_of(AutoModelForCausalLM, models / case.model, how)
        # In evaluation bitsandbytes' 8-bit layers round their inputs too.
        adapter = PeftModel.from_pretrained(base, folder / "adapter").train(
            "load_in_8bit" in options
        )
        assert_logprobs(adapter, result["probe"])


@pytest.mark.parametrize("case", [*HERE, *slow(SLOW_HERE)], ids=by_name)
def test_one_process(case, run_here, models_folder):
    result, folder = run_here(case)
    check_saved(case, result, folder)
    check_adapters(case, result, folder, models_folder)


@pytest.mark.dist
@pytest.mark.parametrize("case", [*TWO, *slow(SLOW)], ids=by_name)
def test_two_processes(case, two_processes, models_folder):
    result, folder = two_processes(case)
    check_saved(case, result, folder)
    check_adapters(case, result, folder, models_folder)
