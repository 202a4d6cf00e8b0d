"""Episodes that fail on one of two ranks."""

from pathlib import Path
from typing import Any

from step_cases import Case, build_trainer, ppo_config
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.config import UserError


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """By what is wrong with a prompt of rank 1: what each rank says. ``whole``: sequences of each
    rank in a rollout after that.
    """
    trainer = build_trainer(ppo_config(case, models))
    rank = dist.rank()
    prompts = [ids for ids in PROMPTS if ids != [3, 3, 3]][4 * rank : 4 * rank + 4]

    def said(wrong: list[int]) -> list[str]:
        try:
            trainer.generate_experience([*prompts[:3], wrong] if rank == 1 else prompts)
        except UserError as error:
            return dist.gather_objects(str(error))
        return dist.gather_objects("nothing")

    return {
        "environment": said([3, 3, 3]),
        "too_long": said([5] * 33),
        "whole": dist.gather_objects(trainer.generate_experience(prompts).num_sequences),
    }


RUNNERS = {"episode_faults": _run}
