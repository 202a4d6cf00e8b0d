"""Step 2 on the policy in small: cases ``dpo``, ``ipo`` and ``kto`` of `step_cases`.

A `Case` and the folder of tiny checkpoints give a JSON-able dict, as in `step_cases`.
"""

import json
from pathlib import Path
from typing import Any

from step_cases import EOS, Case, _batch_sizes, probe_logprobs, training_rows
from transformers import set_seed

import dschat.distributed as dist
from dschat.config import RewardConfig
from dschat.config.fields import fixed_or_zero
from dschat.data.micro_batches import MicroBatchSize
from dschat.models.checkpoint import Checkpoint
from dschat.models.tokenizer import load_tokenizer
from dschat.observability.metrics_log import MetricsLog
from dschat.runtime.deepspeed_engine import ZeroSettings, sharded_loading, zero_settings
from dschat.supervised import loop, preference, setup

NUM_HELD_OUT = 7


def build_preference(case: Case, models: Path, out: Path):
    """Engine, task, configuration, tables, files: as the main of step 2 builds them."""
    path = str(models / case.model)
    config = RewardConfig(
        loss=case.step,
        model_name_or_path=path,
        output_dir=str(out),
        zero_stage=case.zero,
        max_seq_len=20,
        learning_rate=3e-3,
        dtype="fp32",
        num_train_epochs=1,
        per_device_train_batch_size=case.micro,
        per_device_eval_batch_size=3,
        report_to=["none"],
        **_batch_sizes(case),
    )
    case.apply_options(config)
    config.validate()
    set_seed(config.seed)
    tokenizer = load_tokenizer(path, "--model_name_or_path")
    zero = zero_settings(config)

    def load(zero: ZeroSettings, dropout: float):
        with sharded_loading(zero):
            checkpoint = Checkpoint(path, "--model_name_or_path")
            return checkpoint.language_model(zero.dtype, dropout, weight_bits=zero.weight_bits)

    model = load(zero, 0.0)
    files = setup.HubFiles(model.config, tokenizer, (EOS,))
    engine = setup.build_engine(model, config, zero, 5)
    reference = preference.load_reference(config, zero, load)
    task = preference.PreferenceTask(config, reference)
    rows = training_rows(case)
    tables = preference.as_pairs(config, rows, rows[:NUM_HELD_OUT])
    budget = fixed_or_zero(config.max_tokens_per_micro_batch)
    if config.precompute_ref_logprobs:
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
    result: dict[str, Any] = {"probe": probe_logprobs(engine)}
    setup.save(engine, config, files, subfolder="actor")
    if dist.is_main_process():
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        names = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "kl")
        for name in (*names, "grad_norm", *(f"eval/{name}" for name in names)):
            result[name] = [line[name] for line in lines if name in line]
    return result


RUNNERS = dict.fromkeys(("dpo", "ipo", "kto"), _run)
