"""Measures episodes of several turns: all together against one after the other.

    python benchmarks/episodes.py [--episodes 32] [--rounds 3]

A Llama of 35M parameters with random weights, fp32; prompts of 64 tokens, up to 4 answers of 32
tokens on average, with replies of 16 between them. Sides take turns. Prints a JSON line: seconds of
an episode on both sides, and how many tokens were computed of all that the turns' prompts have.
"""

import argparse
import json
import statistics
import time

import torch
from report import environment
from rollout_workloads import llama
from transformers import LlamaForCausalLM

from dschat.environments.contract import Environment, Observation
from dschat.environments.episodes import EpisodeLimits, EpisodeRunner
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams

PROMPT, ANSWER, REPLY, TURNS = 64, 32, 16, 4
LIMITS = EpisodeLimits(TURNS, 4 * ANSWER, 60.0, 16, tells=False)


class Replies:
    """Ends after ``TURNS`` answers."""

    def reset(self) -> None:
        self.turns = 0

    def step(self, answer: str) -> tuple[str, float, bool]:
        self.turns += 1
        return answer, 0.0, self.turns == TURNS


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

    def run(chosen: list[int]) -> tuple[float, int, int]:
        """Seconds, computed and found tokens."""
        runner = EpisodeRunner(
            engine, Text(), lambda: Environment(Replies), reply_ids, LIMITS, unused
        )
        started = time.perf_counter()
        ids = [prompts[i] for i in chosen]
        episodes = runner.run(ids, ["" for _ in ids], [{} for _ in ids], sampling, chosen)
        seconds = time.perf_counter() - started
        turns.append(statistics.mean(e.num_turns for e in episodes))
        engine.forget_prefixes()
        return seconds, runner.stats.prefill_tokens, runner.stats.cached_tokens

    turns: list[float] = []
    together, alone = [], []
    for _ in range(args.rounds):
        seconds, computed, cached = run(list(range(args.episodes)))
        together.append(seconds / args.episodes)
        alone.append(sum(run([i])[0] for i in range(args.episodes)) / args.episodes)
    ratios = [b / a for a, b in zip(together, alone, strict=True)]
    line = {
        "together_s": together,
        "one_by_one_s": alone,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "turns": statistics.mean(turns),
        "prefill_tokens": computed,
        "cached_tokens": cached,
    }
    print(json.dumps(line | environment(torch.device("cpu"))))


if __name__ == "__main__":
    main()
