"""vLLM itself as the back end of rollouts: `make test-vllm`, or an environment that has it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from families import logprob_gap
from rollout_cases import settings_of
from transformers import AutoModelForCausalLM, LlamaConfig

import dschat.distributed as dist
from dschat.hybrid.vllm_rollout import VLLMRollout
from dschat.inference import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROOT = Path(__file__).parents[2]
VOCAB, EOS = 250, 0
PROMPTS = [[5, 6, 7], [9] * 20, [3], [100, 101, 200, 201, 249], list(range(1, 60))]
RUN = "train.py --recipe arithmetic --step 3 --actor-model builtin/tiny --no_report"
RUN += " --rollout_backend vllm"


@pytest.fixture(scope="module")
def module():
    """Head sizes below 32 are unknown to vLLM's attention on a CPU; the head has unknown ids."""
    dist.init()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in made.parameters():
        parameter.data.mul_(3)
    return made


def test_fifty_versions_are_those_of_the_module(module):
    """Log-probs and greedy answers after every update; memory does not grow."""
    sizes = {"stop_ids": (EOS,), "num_tokens": VOCAB, "max_seq_len": 100, "kv_cache_gib": 1}
    form = VLLMRollout(module, module.config, settings_of(**sizes))
    sampled = SamplingParams(12, n=2, seed=3, stop_token_ids=(7,), min_new_tokens=3)
    greedy = SamplingParams(8, temperature=0.0, ignore_eos=True)
    used = []
    for version in range(50):
        generator = form.enter(version)
        rollout = generator.generate(PROMPTS, sampled)
        assert logprob_gap(module, PROMPTS, rollout) < 1e-4
        for prompt, answer in zip(
            PROMPTS, generator.generate(PROMPTS, greedy).token_ids, strict=True
        ):
            with torch.no_grad():
                logits = module(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert logits[:, :VOCAB].argmax(-1).tolist() == answer
        form.leave()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        used.append(psutil.Process().memory_info().rss / 2**20)
    assert used[-1] - used[9] < 20
    again = form.enter(50)
    apart = again.generate(PROMPTS[1:3], sampled, [1, 2])
    assert apart.token_ids == again.generate(PROMPTS, sampled).token_ids[2:6]


def command(folder, flags):
    return [sys.executable, *RUN.split(), "--output_dir", str(folder), *flags.split()]


def test_more_prompt_tokens_than_a_step_takes(module):
    """vLLM would cut a prompt, whose draws it cannot set back on a CPU."""
    prompts = [[5 + (n + i) % 200 for i in range(90)] for n in range(120)]
    sizes = {"stop_ids": (EOS,), "num_tokens": VOCAB, "max_seq_len": 100, "kv_cache_gib": 1}
    form = VLLMRollout(module, module.config, settings_of(**sizes, max_num_seqs=120))
    rollout = form.enter(0).generate(prompts, SamplingParams(6, seed=3))
    assert logprob_gap(module, prompts, rollout) < 1e-4


@pytest.mark.parametrize(
    "flags",
    [
        "--num-gpus 2 --step3.actor_zero_stage 3",
        "--num-gpus 2 --step3.actor_zero_stage 3 --step3.inference_tp_size 2 "
        "--step3.advantage_estimator gae --step3.actor_lora_dim 8",
    ],
)
def test_a_run_of_two_processes_that_is_killed_goes_on(tmp_path, flags):
    started = command(tmp_path, flags + " --max_steps 6 --step3.save_steps 1 --step3.eval_steps 3")
    first = subprocess.Popen(started, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    checkpoint = tmp_path / "step3_rlhf" / "checkpoints" / "step_000002"
    deadline = time.monotonic() + 300
    while not checkpoint.exists():
        assert first.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "step3_rlhf" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert max(row["step"] for row in rows) == 6
    assert max(row.get("rollout/logprob_gap", 0.0) for row in rows) < 1e-4
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []
