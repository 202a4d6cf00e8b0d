"""Measures training on one long row: seconds and memory by its length and the ranks that share it.

    python benchmarks/long_rows.py                # 4k, 16k and 64k tokens, 1 and 2 ranks
    python benchmarks/long_rows.py --tokens 16384 --ranks 2 --stage 3

Each case is a new process (one a rank) with a Llama of random weights that trains on one row in
fp32 on the CPU: `--sequence_parallel_size` ranks, gradient checkpointing, a loss on the last 256
tokens. One JSON line per case goes to stdout: seconds of the last step, and the largest rank's
peak memory in it, over what it held before.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from report import ROOT, environment, free_port
from transformers import LlamaConfig, LlamaForCausalLM

import dschat.distributed as dist
from dschat.config import SFTConfig
from dschat.data.micro_batches import MicroBatchSize
from dschat.distributed.memory import peak_bytes, restart_peak
from dschat.models.heads import LanguageModel
from dschat.runtime.deepspeed_engine import trained_engine, zero_settings
from dschat.supervised.loop import SFTTask, train_step


def measure(tokens: int, ranks: int, stage: int, steps: int) -> dict[str, Any]:
    """Collective. One case, in this process."""
    dist.init()
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = SFTConfig(
        zero_stage=stage,
        gradient_checkpointing=True,
        sequence_parallel_size=ranks,
        learning_rate=1e-4,
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8192, max_position_embeddings=tokens, **sizes, **heads)
    )
    model.config.use_cache = False
    count = sum(p.numel() for p in model.parameters())
    engine = trained_engine(model, config, "", zero_settings(config), LanguageModel, 10)
    engine.train()
    mask = [False] * (tokens - 256) + [True] * 256
    row = {"input_ids": [i % 8191 for i in range(tokens)], "loss_mask": mask}
    rows = [row] if dist.rank() == 0 else []
    before, seconds = 0, 0.0
    for _ in range(steps):  # the first one allocates the optimizer's states
        dist.barrier()
        before, started = restart_peak(dist.device()), time.perf_counter()
        train_step(engine, SFTTask(), rows, MicroBatchSize(1, ranks=ranks))
        seconds = time.perf_counter() - started
    peaks = dist.gather_objects(peak_bytes(dist.device()) - before)
    return {
        "tokens": tokens,
        "ranks": ranks,
        "zero_stage": stage,
        "parameters": count,
        "seconds": round(seconds, 1),
        "peak_gib": round(max(peaks) / 2**30, 3),
        "peak_kib_a_token": round(max(peaks) / 2**10 / tokens, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=2, help="the last one is measured")
    args = parser.parse_args()
    if "RANK" in os.environ:
        result = measure(args.tokens[0], args.ranks[0], args.stage, args.steps)
        if dist.is_main_process():
            print(json.dumps(result), flush=True)
        dist.shutdown()
        return
    print(json.dumps(environment(torch.device("cpu"))), flush=True)
    threads = torch.get_num_threads()
    for tokens in args.tokens:
        for ranks in args.ranks:
            case = ["--tokens", str(tokens), "--ranks", str(ranks), "--stage", str(args.stage)]
            case += ["--steps", str(args.steps)]
            shared = {
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "OMP_NUM_THREADS": str(max(1, threads // ranks)),
                "PYTHONPATH": str(ROOT),
            }
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, *case],
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(ranks)
            ]
            assert not any([process.wait() for process in processes])


if __name__ == "__main__":
    main()
