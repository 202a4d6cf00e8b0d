"""Whole runs of steps 1 and 2: checks, model, loop, checkpoints, evaluation, the saved model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import dschat.distributed as dist
from dschat.config import RewardConfig, SFTConfig
from dschat.data.batches import StepBatches
from dschat.data.preference_rows import most_answers
from dschat.data.tokenize import preference_dataset, sft_dataset
from dschat.models.heads import ScoreModel
from dschat.models.tokenizer import ensure_distinct_pad, num_ids, stop_ids
from dschat.observability import console
from dschat.observability.metrics_log import MetricsLog
from dschat.runtime.best_model import BestModel, check_best
from dschat.runtime.deepspeed_engine import sharded_loading, unwrap, zero_settings
from dschat.runtime.gold_eval import log_gold
from dschat.runtime.hub import publish
from dschat.runtime.output_dir import claim_output_dir, mark_complete, record_of
from dschat.runtime.start import Callbacks, start_step
from dschat.supervised import loop, preference, setup


def train_sft(config: SFTConfig, callbacks: Sequence[Any] = ()) -> Any:
    """Collective. Fine-tune a language model on demonstrations as ``config`` says, and save it;
    returns DeepSpeed's engine. ``callbacks``: see `dschat.runtime.start`.

    Raises:
        UserError: before weights load, for a mistake in settings, names or data.
        TrainingStopped: after a checkpoint, where the run was asked to stop.
    """
    call = start_step(config, callbacks)
    zero = zero_settings(config)

    # Load. Mistakes in names and data show before any weight loads.
    base = setup.read_base(config, "lm")
    with dist.main_process_first():
        train, held_out = sft_dataset(config, base.tokenizer, "both")
    batches = setup.step_batches(config, train, held_out)
    check_best(config, loop.SFTTask.columns, len(batches[1]))
    model = setup.load_policy(config, base, zero, config.dropout)
    files = setup.policy_files(config, base, model)
    engine = setup.build_engine(model, config, zero, loop.num_total_steps(config, batches[0]))
    task, is_whole = loop.SFTTask(), not zero.shards_parameters
    return _trained(config, engine, task, batches, files, call, is_whole)


def train_on_preferences(config: RewardConfig, callbacks: Sequence[Any] = ()) -> Any:
    """Collective. Train a reward model, or with a policy loss a policy, on answers that were
    compared, and save it; returns DeepSpeed's engine. Raises as `train_sft` does.
    """
    call = start_step(config, callbacks)
    zero = zero_settings(config)

    # Load. Mistakes in names and data show before any weight loads.
    base = setup.read_base(config, "lm" if config.trains_policy else "score")
    with dist.main_process_first():
        tables = preference_dataset(config, base.tokenizer, "both")

    # Weights, loop and save, by what is trained.
    train = _train_policy if config.trains_policy else _train_reward_model
    return train(config, zero, base, tables, call)


def _train_reward_model(
    config: RewardConfig, zero: Any, base: Any, tables: Any, call: Callbacks
) -> Any:
    """Put a score head on the language model and train it on the pairs, for step 3."""
    ensure_distinct_pad(base.tokenizer)
    batches = setup.step_batches(config, *tables)
    check_best(config, loop.RewardTask.columns, len(batches[1]))
    num_steps = loop.num_total_steps(config, batches[0])
    with sharded_loading(zero):
        model = base.checkpoint.score_model(
            zero.dtype,
            base.tokenizer.pad_token_id,
            from_base=True,
            dropout=config.dropout,
            attn_implementation=config.attn_implementation,
            num_tokens=num_ids(base.tokenizer),
            longest_row=config.max_seq_len,
            weight_bits=zero.weight_bits,
        )
    ends = stop_ids(base.tokenizer)
    files = setup.HubFiles(model.config, base.tokenizer, ends)
    engine = setup.build_engine(model, config, zero, num_steps, wrap=ScoreModel)
    task = loop.RewardTask(most_answers(*tables))
    return _trained(config, engine, task, batches, files, call)


def _train_policy(config: RewardConfig, zero: Any, base: Any, tables: Any, call: Callbacks) -> Any:
    """Train the policy on the pairs against a frozen reference; saved where step 3 would save."""
    tables = preference.as_pairs(config, *tables)
    batches = setup.step_batches(config, *tables)
    check_best(config, preference.PreferenceTask.columns, len(batches[1]))
    load = partial(setup.load_policy, config, base)
    model = load(zero, config.dropout or 0.0)
    files = setup.policy_files(config, base, model)
    engine = setup.build_engine(model, config, zero, loop.num_total_steps(config, batches[0]))
    task = preference.PreferenceTask(config, preference.load_reference(config, zero, load))
    return _trained(config, engine, task, batches, files, call, not zero.shards_parameters)


def _trained(
    config: SFTConfig | RewardConfig,
    engine: Any,
    task: loop.Task,
    batches: tuple[StepBatches, StepBatches],
    files: setup.HubFiles,
    call: Callbacks,
    generates: bool = False,
) -> Any:
    """Collective. Run the loop, save the model and finish the step; returns ``engine``.

    ``generates``: the model can, for the gold score; not where ZeRO-3 shards its weights.
    """
    assert config.output_dir is not None
    setup.settle_micro_batches(config, engine, task, *batches)
    claim_output_dir(config.output_dir, bool(config.resume), record_of(config))
    console.release()
    metrics_log = MetricsLog(config.output_dir, config)
    subfolder = ""
    if isinstance(task, preference.PreferenceTask):
        subfolder = "actor"
        for each in batches:
            task.precompute(engine, each.dataset, batches[1].size)
    gold = partial(log_gold, config, unwrap(engine), files.tokenizer, files.stop_ids, metrics_log)
    if generates:
        gold(0)
    save = partial(setup.save, engine, config, files)
    name = "reward_best" if isinstance(task, loop.RewardTask) else "actor_best"
    best = BestModel(config, name, lambda folder: save(folder.name))
    loop.train(engine, task, config, *batches, metrics_log, partial(save, subfolder), call, best)
    if generates:
        gold(loop.num_total_steps(config, batches[0]))
    call("on_end", engine)
    metrics_log.close()
    mark_complete(config.output_dir)
    publish(config)
    return engine
