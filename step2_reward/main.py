"""Step 2, reward modelling: a language model learns which of two answers people prefer.

deepspeed step2_reward/main.py --model_name_or_path facebook/opt-350m
python step2_reward/main.py --help
"""

from dschat import cli, dist
from dschat.config import RewardConfig


def main() -> None:
    # Parse. Only then does torch load: --help and typing errors answer at once.
    config = cli.parse(RewardConfig)

    from transformers import set_seed

    from dschat import log, supervised
    from dschat.builtin_model import resolve_model
    from dschat.data.tokenize import preference_dataset
    from dschat.deepspeed_setup import sharded_loading, unwrap
    from dschat.models.kind import require_score_head
    from dschat.models.load import load_config, load_score_backbone
    from dschat.models.reward import ScoreModel
    from dschat.models.tokenizer import ensure_distinct_pad
    from dschat.models.vocabulary import num_ids
    from dschat.output_dir import check_output_dir, claim_output_dir

    log.setup(config.log_level, hold=True)
    dist.init()
    set_seed(config.seed)
    config.output_dir = config.output_dir or "output/step2_reward"
    check_output_dir(config.output_dir, config.overwrite_output_dir)
    log.check_sinks(config)
    zero = supervised.zero_settings(config)

    # Load. What can be wrong with names and data is found before any weight.
    with dist.main_process_first():
        name = resolve_model(config.model_name_or_path)
    trust = config.trust_remote_code
    base_config = load_config(name, "--model_name_or_path", trust)
    require_score_head(base_config, name, "--model_name_or_path")
    tokenizer = supervised.load_tokenizer_of_base(config, name, base_config, "score")
    ensure_distinct_pad(tokenizer)
    with dist.main_process_first():
        train_rows, held_out = preference_dataset(config, tokenizer, "both")
    train_batches, eval_batches = supervised.step_batches(config, train_rows, held_out)

    with sharded_loading(zero):
        model = load_score_backbone(
            name,
            "--model_name_or_path",
            zero.dtype,
            from_base="ForSequenceClassification" not in str(base_config.architectures),
            pad_token_id=tokenizer.pad_token_id,
            num_tokens=num_ids(tokenizer),
            dropout=config.dropout,
            attn_implementation=config.attn_implementation,
            trust_remote_code=trust,
        )
    model_config, architecture = model.config, type(model).__name__
    num_steps = supervised.num_total_steps(config, train_batches)
    engine = supervised.build_engine(model, config, zero, num_steps, wrap=ScoreModel)

    # Loop.
    claim_output_dir(config.output_dir)
    log.release()
    metrics_log = log.MetricsLog(config.output_dir, config)
    task = supervised.RewardTask(tokenizer.pad_token_id)
    supervised.train(engine, task, config, train_batches, eval_batches, metrics_log)
    metrics_log.close()

    # Save.
    supervised.save(unwrap(engine).model, config, model_config, tokenizer, architecture)
    log.logger.info("saved %s", config.output_dir)
    dist.shutdown()


if __name__ == "__main__":
    cli.run(main)
