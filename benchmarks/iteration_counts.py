"""Counts the real tokens and model FLOPs of a round of `iteration.py`, over all ranks."""

from dataclasses import dataclass, field

from gpu_floor import on_meta
from iteration_cases import Case, rollout_rows, supervised_rows

from dschat.observability.flops import (
    rlhf_iteration_flops,
    shape_of,
    training_flops,
    transformer_flops,
)


@dataclass
class Counts:
    """Samples of one round; tokens and FLOPs by part (generate, score, train, iteration)."""

    samples: int = 0
    ranks: int = 1
    tokens: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)

    def add(self, samples: int, tokens: dict[str, int], flops: dict[str, float]) -> None:
        self.samples += samples
        for mine, more in ((self.tokens, tokens), (self.flops, flops)):
            for part, value in more.items():
                mine[part] = mine.get(part, 0) + value


def count(case: Case, number: int) -> Counts:
    """The counts of round ``number``."""
    counts = Counts(ranks=case.ranks)
    for rank in range(case.ranks):
        (_count_rollout if case.is_rlhf else _count_rows)(counts, case, number, rank)
    return counts


def _count_rollout(counts: Counts, case: Case, number: int, rank: int) -> None:
    prompts, answers = rollout_rows(case, number, rank)
    prompt_lens = [len(prompt) for prompt in prompts for _ in range(case.samples)]
    answer_lens = [len(answer) for answer in answers]
    shape = shape_of(on_meta(case.config()))
    scorer = shape_of(on_meta(case.config(case.scorer))) if case.task == "ppo" else None
    flops = rlhf_iteration_flops(
        shape,
        scorer,
        scorer,
        prompt_lens,
        answer_lens,
        actor_forwards=2,
        num_samples_per_prompt=case.samples,
    )
    real, generated = sum(prompt_lens) + sum(answer_lens), sum(answer_lens)
    tokens = {"generate": generated, "score": real, "train": real, "iteration": real}
    parts = {part: flops[part] for part in ("generate", "score", "train")}
    counts.add(len(answers), tokens, parts | {"iteration": flops["effective"]})


def _count_rows(counts: Counts, case: Case, number: int, rank: int) -> None:
    rows, shape = supervised_rows(case, number, rank), shape_of(on_meta(case.config()))
    blocks = ("input_ids",) if case.task == "sft" else ("chosen_ids", "rejected_ids")
    lengths = [len(row[block]) for row in rows for block in blocks]
    head = "score" if case.task == "rm" else "lm"
    flops = sum(training_flops(shape, length, head=head) for length in lengths)
    if case.task == "dpo":  # the reference
        flops += sum(transformer_flops(shape, length) for length in lengths)
    parts = ("train", "iteration")
    counts.add(len(rows), dict.fromkeys(parts, sum(lengths)), dict.fromkeys(parts, flops))


def rates(counts: Counts, seconds: dict[str, float]) -> dict:
    """Tokens per second and model TFLOP/s per device of each part, and samples per second."""
    parts = [part for part in counts.tokens if f"{part}_s" in seconds]
    return {
        "tokens_per_s": {p: counts.tokens[p] / seconds[f"{p}_s"] for p in parts},
        "tflops": {p: counts.flops[p] / seconds[f"{p}_s"] / counts.ranks / 1e12 for p in parts},
        "samples_per_s": counts.samples / seconds["iteration_s"],
    }
