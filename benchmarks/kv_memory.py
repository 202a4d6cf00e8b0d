"""Measures how much of the KV cache holds keys and values, by page size.

    python benchmarks/kv_memory.py
    python benchmarks/kv_memory.py --pages 16 32 64 --model llama-7b

The scheduler runs as in a rollout, on pages of one number per token and without a model: prompts of
a quarter to half of the longest sequence, answers of geometric lengths, twice as many prompts as
are decoded at once. After every step, held are the pages in use, and used are the tokens whose keys
and values are computed. One JSON line per longest sequence, batch and page size:

- held_gib, used_gib: means over the steps, for the model's bytes per token. peak_gib: most held.
- waste: held / used - 1. "whole" pages hold a sequence of maximal length each.
"""

import argparse
import json
import math
import random

import torch
from report import environment
from rollout_workloads import MODELS

from dschat.inference.model.architectures import model_spec
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.scheduler import Scheduler
from dschat.inference.requests.sequence import Request

LENGTHS, BATCHES, PAGES = (256, 1024, 4096), (8, 64, 256), ("16", "32", "64", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--pages", nargs="+", default=PAGES, help="tokens, or whole")
    parser.add_argument("--model", choices=MODELS, default="llama-7b", help="bf16 bytes per token")
    args = parser.parse_args()
    token_gib = model_spec(MODELS[args.model]()).token_bytes(1, 2) / 2**30
    head = {"benchmark": "kv_memory", "model": args.model} | environment(torch.device("cpu"))
    for length in args.lengths:
        for batch in args.batches:
            for page in args.pages:
                size = length if page == "whole" else min(int(page), length)
                held, used, peak = tokens(length, batch, size)
                line = {"length": length, "batch": batch, "page": page}
                line |= {"held_gib": round(held * token_gib, 3)}
                line |= {"used_gib": round(used * token_gib, 3)}
                line |= {"peak_gib": round(peak * token_gib, 3), "waste": round(held / used - 1, 4)}
                print(json.dumps(head | line), flush=True)


def tokens(length: int, batch: int, page_size: int) -> tuple[float, float, int]:
    """Tokens held and used, means over the steps, and the most held."""
    num_pages = batch * math.ceil(length / page_size)
    cache = KVCache(1, num_pages, page_size, 1, 1, torch.float32, torch.device("cpu"))
    scheduler = Scheduler(cache, batch, 8192)
    draw = random.Random(0)
    sequences = []
    for number in range(2 * batch):
        ids = [0] * draw.randint(length // 4, length // 2)
        answer = min(math.ceil(draw.expovariate(3 / length)), length - len(ids))
        sequences += Request(ids, SamplingParams(answer), number).sequences
    scheduler.add(sequences)
    held = used = steps = peak = 0
    while scheduler.has_work:
        schedule = scheduler.schedule()
        running = schedule.decodes + [sequence for sequence, _ in schedule.chunks]
        scheduler.computed(schedule)
        now = (num_pages - cache.num_free) * page_size
        held, peak, steps = held + now, max(peak, now), steps + 1
        used += sum(sequence.computed for sequence in running)
        for sequence in schedule.decodes + [s for s, _ in schedule.chunks]:
            if sequence.computed == len(sequence):
                sequence.answer.append(0)
                if sequence.is_over:
                    scheduler.finish(sequence)
    return held / steps, used / steps, peak


if __name__ == "__main__":
    main()
