"""Step 2, learning from pairs: trains a reward model on which of two answers people prefer, or how
they rank several; or, with --loss dpo, cdpo, ipo or kto, trains the policy on the pairs and leaves
out step 3.

    deepspeed step2_reward/main.py --model_name_or_path facebook/opt-350m
    deepspeed step2_reward/main.py --model_name_or_path output/step1_sft --loss dpo
    python step2_reward/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

from functools import partial

import dschat.distributed as dist
from dschat.config import RewardConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    config = parser.parse(RewardConfig)

    from dschat.data.tokenize import preference_dataset
    from dschat.runtime.deepspeed_engine import zero_settings
    from dschat.runtime.output_dir import mark_complete
    from dschat.runtime.start import start_step
    from dschat.supervised import setup

    start_step(config, "output/step3_rlhf" if config.trains_policy else "output/step2_reward")
    zero = zero_settings(config)

    # Load. Mistakes in names and data show before any weight loads.
    base = setup.read_base(config, "lm" if config.trains_policy else "score")
    with dist.main_process_first():
        tables = preference_dataset(config, base.tokenizer, "both")

    # Weights, loop and save, by what is trained.
    train = train_policy if config.trains_policy else train_reward_model
    train(config, zero, base, tables)
    mark_complete(config.output_dir)
    dist.shutdown()


def train_reward_model(config, zero, base, tables) -> None:
    """Put a score head on the language model and train it on the pairs, for step 3."""
    from dschat.data.preference_rows import most_answers
    from dschat.models.score_model import ScoreModel
    from dschat.models.tokenizer import ensure_distinct_pad, stop_ids
    from dschat.models.vocabulary import num_ids
    from dschat.runtime.deepspeed_engine import sharded_loading
    from dschat.supervised import loop, setup, tasks

    ensure_distinct_pad(base.tokenizer)
    batches = setup.step_batches(config, *tables)
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
        )
    ends = stop_ids(base.tokenizer)
    files = setup.HubFiles(model.config, base.tokenizer, ends)
    engine = setup.build_engine(model, config, zero, num_steps, wrap=ScoreModel)
    task = tasks.RewardTask(most_answers(*tables))
    setup.settle_micro_batches(config, engine, task, *batches)

    # Loop, and save.
    metrics_log = setup.claim_output(config)
    save = partial(setup.save, engine, config, files)
    loop.train(engine, task, config, *batches, metrics_log, save)
    metrics_log.close()


def train_policy(config, zero, base, tables) -> None:
    """Train the policy on the pairs against a frozen reference; saved where step 3 would save."""
    from dschat.runtime.deepspeed_engine import unwrap
    from dschat.runtime.gold_eval import GoldEvaluation
    from dschat.supervised import loop, preference, setup

    tables = preference.as_pairs(config, *tables)
    batches = setup.step_batches(config, *tables)
    num_steps = loop.num_total_steps(config, batches[0])
    load = partial(setup.load_policy, config, base)
    model = load(zero, config.dropout or 0.0)
    files = setup.policy_files(config, base, model)
    engine = setup.build_engine(model, config, zero, num_steps)
    reference = preference.load_reference(config, zero, load)
    task = preference.PreferenceTask(config, reference)
    setup.settle_micro_batches(config, engine, task, *batches)

    # Loop, and save.
    metrics_log = setup.claim_output(config)
    if config.precompute_ref_logprobs:
        for table in tables:
            task.precompute(engine, table, batches[1].size)
    gold = GoldEvaluation(
        unwrap(engine), base.tokenizer, files.stop_ids, config, zero.shards_parameters
    )
    gold.log(metrics_log, 0)
    save = partial(setup.save, engine, config, files, subfolder="actor")
    loop.train(engine, task, config, *batches, metrics_log, save)
    gold.log(metrics_log, num_steps)
    metrics_log.close()


if __name__ == "__main__":
    entrypoint.run(main)
