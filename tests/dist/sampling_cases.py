"""Prompts that are drawn by the scores of their answers, by a tiny actor that does not change."""

from pathlib import Path
from typing import Any

from step_cases import Case, build_trainer, ppo_config
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.data.batches import PromptBatches
from dschat.rlhf.prompt_sampling import AdaptivePrompts
from dschat.rlhf.prompts import PromptQueue


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """The places of the prompts of each rollout, over all ranks, and what was learned of them."""
    config = ppo_config(case, models)
    trainer = build_trainer(config)
    rows = [{"prompt_ids": ids} for ids in PROMPTS]
    batches = PromptBatches(rows, 8, dist.rank(), dist.world_size(), config.seed)
    prompts = AdaptivePrompts(batches, config.num_samples_per_prompt)
    trainer.collector.policy.more = PromptQueue(prompts)
    drawn, kept = [], []
    for iteration in range(case.iterations):
        trainer.iteration = iteration
        table = next(prompts)
        e = trainer.generate_experience(table)
        drawn.append(sum(dist.gather_objects(table.places), []))
        numbered = list(zip(e.numbers.tolist(), e.places or [], strict=True))
        kept.append([place for _, place in sorted(sum(dist.gather_objects(numbered), []))])
    return {"drawn": drawn, "kept": kept, "state": prompts.state_dict()}


RUNNERS = {"sampling": _run}
