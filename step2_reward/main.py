"""Step 2, learning from pairs: a reward model learns which of two answers people prefer; or, with
--loss dpo, cdpo, ipo or kto, the policy itself does, and there is no step 3.

    deepspeed step2_reward/main.py --model_name_or_path facebook/opt-350m
    deepspeed step2_reward/main.py --model_name_or_path output/step1_sft --loss dpo
    python step2_reward/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.interrupts import exit_on_interrupt

    exit_on_interrupt()

from functools import partial

import dschat.distributed as dist
from dschat.config import RewardConfig, parser
from dschat.distributed import entrypoint

BASE = "--model_name_or_path"


def main() -> None:
    # Parse. Only then does torch load: --help and typing errors answer at once.
    config = parser.parse(RewardConfig)

    from transformers import set_seed

    from dschat.builtin.tiny_model import resolve_model
    from dschat.checkpoint.compatibility import check_start
    from dschat.data.tokenize import preference_dataset
    from dschat.models.load import load_config
    from dschat.models.model_kind import require_causal_lm, require_score_head
    from dschat.observability import console
    from dschat.observability.metrics_log import check_sinks
    from dschat.runtime.output_dir import check_output_dir
    from dschat.supervised import setup

    console.setup(config.log_level, hold=True)
    dist.init()
    set_seed(config.seed)
    folder = "output/step3_rlhf" if config.trains_policy else "output/step2_reward"
    config.output_dir = config.output_dir or folder
    check_output_dir(config.output_dir, config.overwrite_output_dir, vars(config))
    check_start(config)
    check_sinks(config)
    zero = setup.zero_settings(config)

    # Load. What can be wrong with names and data is found before any weight.
    with dist.main_process_first():
        name = resolve_model(config.model_name_or_path)
    model_config = load_config(name, BASE, config.trust_remote_code)
    (require_causal_lm if config.trains_policy else require_score_head)(model_config, name, BASE)
    kind = "lm" if config.trains_policy else "score"
    tokenizer = setup.load_tokenizer_of_base(config, name, model_config, kind)
    with dist.main_process_first():
        tables = preference_dataset(config, tokenizer, "both")

    # The model, the loop and what is saved: on one of two roads.
    road = train_policy if config.trains_policy else train_reward_model
    road(config, zero, name, model_config, tokenizer, tables)
    console.logger.info("saved %s", config.output_dir)
    dist.shutdown()


def train_reward_model(config, zero, name, model_config, tokenizer, tables) -> None:
    """A language model gets a score head, for step 3."""
    from dschat.launch.finished_steps import record_of
    from dschat.models.load import load_score_backbone
    from dschat.models.score_model import ScoreModel
    from dschat.models.tokenizer import ensure_distinct_pad
    from dschat.models.vocabulary import num_ids
    from dschat.observability import console
    from dschat.observability.metrics_log import MetricsLog
    from dschat.runtime.deepspeed_engine import sharded_loading, unwrap
    from dschat.runtime.output_dir import claim_output_dir
    from dschat.supervised import loop, setup, tasks

    ensure_distinct_pad(tokenizer)
    batches = setup.step_batches(config, *tables)
    num_steps = loop.num_total_steps(config, batches[0])
    with sharded_loading(zero):
        model = load_score_backbone(
            name,
            BASE,
            zero.dtype,
            from_base="ForSequenceClassification" not in str(model_config.architectures),
            pad_token_id=tokenizer.pad_token_id,
            num_tokens=num_ids(tokenizer),
            dropout=config.dropout,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    companions = (model.config, tokenizer, type(model).__name__)
    engine = setup.build_engine(model, config, zero, num_steps, wrap=ScoreModel)

    # Loop.
    claim_output_dir(config.output_dir, bool(config.resume), record_of(config))
    console.release()
    metrics_log = MetricsLog(config.output_dir, config)
    task = tasks.RewardTask(tokenizer.pad_token_id)
    loop.train(engine, task, config, *batches, metrics_log)
    metrics_log.close()

    # Save.
    setup.save(unwrap(engine).model, config, *companions)


def train_policy(config, zero, name, model_config, tokenizer, tables) -> None:
    """A language model stays one, held to what it was; it lies where step 3 would leave it."""
    from dschat.inference.hf_generator import HuggingFaceGenerator
    from dschat.launch.finished_steps import record_of
    from dschat.models.load import load_causal_lm
    from dschat.models.tokenizer import stop_ids
    from dschat.models.vocabulary import match_vocabulary, num_ids
    from dschat.observability import console
    from dschat.observability.metrics_log import MetricsLog
    from dschat.runtime.deepspeed_engine import sharded_loading, unwrap
    from dschat.runtime.gold_eval import gold_knows, sample_gold
    from dschat.runtime.output_dir import claim_output_dir
    from dschat.supervised import loop, preference, setup

    tables = preference.as_pairs(config, *tables)
    batches = setup.step_batches(config, *tables)
    num_steps = loop.num_total_steps(config, batches[0])
    load = partial(
        load_causal_lm,
        name,
        BASE,
        zero.dtype,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        num_tokens=num_ids(tokenizer),
    )
    with sharded_loading(zero):
        model = load(dropout=config.dropout or 0.0)
    match_vocabulary(model_config, model.config, config.lora_dim > 0 and config.only_optimize_lora)
    stops = stop_ids(tokenizer, model.generation_config)
    companions = (model_config, tokenizer, type(model).__name__, stops)
    engine = setup.build_engine(model, config, zero, num_steps)
    task = preference.PreferenceTask(
        config, tokenizer.pad_token_id, preference.load_reference(config, zero, load)
    )

    # Loop.
    claim_output_dir(config.output_dir, bool(config.resume), record_of(config))
    console.release()
    metrics_log = MetricsLog(config.output_dir, config)
    if config.precompute_ref_logprobs:
        for table in tables:
            task.precompute(engine, table, config.per_device_eval_batch_size)
    judged = gold_knows(config.data_path) and not zero.shards_parameters
    generator = HuggingFaceGenerator(
        unwrap(engine), stops, tokenizer.pad_token_id, num_tokens=num_ids(tokenizer)
    )
    if judged:
        metrics_log.write(0, sample_gold(generator, tokenizer, config.max_eval_samples))
    loop.train(engine, task, config, *batches, metrics_log)
    if judged:
        gold = sample_gold(generator, tokenizer, config.max_eval_samples)
        metrics_log.write(num_steps, gold)
        console.logger.info("gold score of sampled answers: %.3f", gold["eval/gold"])
    metrics_log.close()

    # Save.
    setup.save(unwrap(engine), config, *companions, subfolder="actor")


if __name__ == "__main__":
    entrypoint.run(main)
