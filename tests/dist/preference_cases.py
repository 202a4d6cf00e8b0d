"""Step 2 on the policy in small: cases ``dpo``, ``ipo`` and ``kto`` of `step_cases`.

A `Case` and the folder of tiny checkpoints give a JSON-able dict, as in `step_cases`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from step_cases import (
    Case,
    probe_logprobs,
    supervised_config,
    supervised_metrics,
    training_rows,
)

from dschat.config.fields import fixed_or_zero
from dschat.data.micro_batches import MicroBatchSize
from dschat.observability.metrics_log import MetricsLog
from dschat.runtime.deepspeed_engine import zero_settings
from dschat.supervised import loop, preference, setup

NUM_HELD_OUT = 7


def build_preference(case: Case, models: Path, out: Path):
    """Engine, task, configuration, tables, files: as the main of step 2 builds them."""
    config = supervised_config(case, models, out, loss=case.step)
    config.validate()
    zero = zero_settings(config)
    base = setup.read_base(config, "lm")
    load = partial(setup.load_policy, config, base)
    model = load(zero, 0.0)
    files = setup.policy_files(config, base, model)
    engine = setup.build_engine(model, config, zero, 5)
    reference = preference.load_reference(config, zero, load)
    task = preference.PreferenceTask(config, reference)
    rows = training_rows(case)
    tables = preference.as_pairs(config, rows, rows[:NUM_HELD_OUT])
    budget = fixed_or_zero(config.max_tokens_per_micro_batch)
    for table in tables:
        task.precompute(engine, table, MicroBatchSize(5, budget))
    return engine, task, config, tables, files


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    engine, task, config, tables, files = build_preference(case, models, out)
    batches = setup.step_batches(config, *tables)
    setup.settle_micro_batches(config, engine, task, *batches)
    log = MetricsLog(config.output_dir, config)
    loop.train(engine, task, config, *batches, log)
    log.close()
    engine.eval()
    probe = probe_logprobs(engine)
    setup.save(engine, config, files, subfolder="actor")
    names = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "kl")
    evaluated = (f"eval/{name}" for name in names)
    return {"probe": probe} | supervised_metrics(out, *names, "grad_norm", *evaluated)


RUNNERS = dict.fromkeys(("dpo", "ipo", "kto"), _run)
