"""Measures episodes of several turns: all together against one after the other; and environments
that compute in Python in threads against worker processes.

    python benchmarks/episodes.py [--episodes 32] [--rounds 3] [--busy_ms 20]

A Llama of 35M parameters with random weights, fp32; prompts of 64 tokens, up to 4 answers of 32
tokens on average, with replies of 16 between them. Sides take turns. Prints a JSON line: seconds of
an episode on all sides, and how many tokens were computed of all that the turns' prompts have.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from busy_environment import TURNS
from report import environment, ratios
from rollout_workloads import llama
from transformers import LlamaForCausalLM

from dschat.config import RLHFConfig
from dschat.environments.contract import Observation
from dschat.environments.episodes import EpisodeRunner
from dschat.environments.sources import load_environment
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams

PROMPT, ANSWER, REPLY = 64, 32, 16
LIMITS = RLHFConfig(
    max_turns=TURNS,
    max_turn_tokens=4 * ANSWER,
    environment_timeout_s=60.0,
    environment_workers=16,
)


class Text:
    """In place of a tokenizer: no text."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return str(sum(ids))


def reply_ids(observation: Observation) -> list[int]:
    generator = torch.Generator().manual_seed(int(observation.text))
    return torch.randint(10, 32_000, (REPLY,), generator=generator).tolist()


def unused(row: int, text: str) -> list[int]:
    """Nothing is appended to a prompt."""
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy_ms", type=float, default=20.0, help="that a step computes")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = LlamaForCausalLM(llama(384, 6, 6, 1024, 32_000)).eval()
    sizes = EngineConfig(max_num_seqs=args.episodes, max_seq_len=1024, page_size=32)
    engine = InferenceEngine(module.config, torch.float32, torch.device("cpu"), sizes)
    engine.weights.load((n, p.detach()) for n, p in module.named_parameters())
    # Every 32nd id ends an answer, so that its length is geometric.
    ends = tuple(range(0, 32_000, ANSWER))
    sampling = SamplingParams(TURNS * (4 * ANSWER + REPLY), stop_token_ids=ends)
    prompts = torch.randint(10, 32_000, (args.episodes, PROMPT)).tolist()
    source = load_environment(f"{Path(__file__).with_name('busy_environment.py')}:Replies")
    threads = source.maker(None)
    processes = source.processes(None, True, 2, LIMITS.timeout_s)

    def run(chosen: list[int], make: Any = threads, busy_ms: float = 0.0) -> tuple[float, int, int]:
        """Seconds, computed and found tokens."""
        runner = EpisodeRunner(engine, Text(), make, reply_ids, LIMITS, unused)
        started = time.perf_counter()
        ids = [prompts[i] for i in chosen]
        columns = [{"busy_ms": busy_ms} for _ in ids]
        episodes = runner.run(ids, ["" for _ in ids], columns, sampling, chosen)
        seconds = time.perf_counter() - started
        turns.append(statistics.mean(e.num_turns for e in episodes))
        engine.forget_prefixes()
        return seconds, runner.stats.prefill_tokens, runner.stats.cached_tokens

    turns: list[float] = []
    every = list(range(args.episodes))
    run(every, processes)  # starts them
    together, alone, in_threads, in_processes = [], [], [], []
    for _ in range(args.rounds):
        seconds, computed, cached = run(every)
        together.append(seconds / args.episodes)
        alone.append(sum(run([i])[0] for i in every) / args.episodes)
        in_threads.append(run(every, threads, args.busy_ms)[0] / args.episodes)
        in_processes.append(run(every, processes, args.busy_ms)[0] / args.episodes)
    processes.close()
    line = {
        "together_s": together,
        "one_by_one_s": alone,
        "ratio": ratios(alone, together),
        "busy_ms": args.busy_ms,
        "busy_in_threads_s": in_threads,
        "busy_in_processes_s": in_processes,
        "busy_ratio": ratios(in_threads, in_processes),
        "turns": statistics.mean(turns),
        "prefill_tokens": computed,
        "cached_tokens": cached,
    }
    print(json.dumps(line | environment(torch.device("cpu"))))


if __name__ == "__main__":
    main()
