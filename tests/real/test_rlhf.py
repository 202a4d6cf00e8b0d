"""Preferences and RLHF with real models: DPO, a reward model and PPO on it, GRPO."""

import math

import pytest
import torch
from training_runs import ROWS, command, logged, metrics, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytestmark = pytest.mark.real

PAIRS = "--per_device_train_batch_size 8 --lora_dim 8 --learning_rate 1e-3"
ROLLOUTS = (
    "--max_steps 2 --per_device_generation_batch_size 4 --num_samples_per_prompt 2 "
    "--per_device_training_batch_size 8 --max_prompt_seq_len 64 --max_answer_seq_len 12 "
    "--actor_lora_dim 8 --actor_learning_rate 1e-3 --max_eval_samples 0 --sample_steps 1"
)
GAP = 1e-4


def check_rollouts(out):
    """Both iterations scored answers of which training computes the same log-probs."""
    assert len(metrics(out)) == 2
    assert max(logged(out, "rollout/logprob_gap")) < GAP
    assert all(math.isfinite(score) for score in logged(out, "objective/scores"))
    first, second = logged(out, "objective/kl")
    assert first == pytest.approx(0, abs=GAP)
    assert abs(second) > 1e-3


def test_dpo(smollm2, tmp_path):
    out = tmp_path / "run"
    run(command("reward", smollm2, out, PAIRS, "--loss dpo"))
    losses = logged(out, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its reference
    assert losses[-1] < losses[0] - 0.05


def test_a_reward_model_and_ppo_on_it(smollm2, tmp_path):
    reward, out = tmp_path / "reward", tmp_path / "run"
    run(command("reward", smollm2, reward, PAIRS))
    assert logged(reward, "loss")[-1] < logged(reward, "loss")[0]
    check_reward_model(reward)
    critic = f"--critic_model_name_or_path {reward} --critic_lora_dim 8"
    run(command("rlhf", smollm2, out, ROLLOUTS, critic))
    check_rollouts(out)
    AutoModelForSequenceClassification.from_pretrained(out / "critic")


@torch.no_grad()
def check_reward_model(folder):
    """transformers ranks the pairs as training does, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)

    def score(prompt, answer):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return float(model(ids).logits[0, 0])

    right = [score(p, a) > score(p, ROWS[i - 1][1]) for i, (p, a) in enumerate(ROWS)]
    assert sum(right) / len(right) == logged(folder, "eval/accuracy")[-1]


def test_grpo(folder, template, tmp_path):
    out = tmp_path / "run"
    (tmp_path / "rewards.py").write_text(
        "def vowels(answers):\n    return [sum(c in 'aeiou' for c in a) / 20 for a in answers]\n"
    )
    flags = f"--advantage_estimator grpo --reward_fn {tmp_path}/rewards.py:vowels"
    flags += f" --chat_template {template}" if template else ""
    run(command("rlhf", folder, out, ROLLOUTS, flags))
    check_rollouts(out)
    AutoModelForCausalLM.from_pretrained(out / "actor")
