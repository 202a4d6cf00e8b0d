"""A rollout of a tiny actor whose answers move between ranks, as the trainer moves them."""

from pathlib import Path
from typing import Any

from step_cases import Case, build_trainer, my_prompts, ppo_config

import dschat.distributed as dist
from dschat.rlhf.experience import mini_batch_of

_PER_ACTION = ("advantages", "entropy", "logprobs", "loss_mask", "ref_logprobs", "returns")
_PER_ACTION += ("rollout_logprobs", "token_scores", "values")


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """By sequence number: everything that generation, reward functions and models say of it. By
    rank: the mini-batch and the tokens of its sequences.
    """
    config = ppo_config(case, models)
    trainer = build_trainer(config)
    e = trainer.generate_experience(my_prompts(case, 0, config))
    masks = e.answer_mask
    per_action = [
        [row[mask].tolist() for row, mask in zip(getattr(e, name), masks, strict=True)]
        for name in _PER_ACTION
    ]
    ids = [row[:length].tolist() for row, length in zip(e.input_ids, e.lengths, strict=True)]
    per_sequence = [getattr(e, n).tolist() for n in ("scores", "scored", "finished")]
    columns = (e.numbers.tolist(), ids, *per_sequence, *per_action)
    rows = [list(row) for row in zip(*columns, strict=True)]
    seed = [config.seed, 0, 0]
    number = mini_batch_of(e.numbers, e.num_mini_batches, seed, e.together)
    columns = (number.tolist(), e.prompt_lengths.tolist(), e.numbers.tolist(), e.lengths.tolist())
    return {
        "rows": sorted(sum(dist.gather_objects(rows), [])),
        "numbers": dist.gather_objects(e.numbers.tolist()),
        "held": dist.gather_objects([list(row) for row in zip(*columns, strict=True)]),
    }


RUNNERS = {"balance": _run}
