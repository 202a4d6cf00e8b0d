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
    from dschat.checkpoint import claim_output_dir
    from dschat.data.tokenize import preference_dataset
    from dschat.deepspeed_setup import sharded_loading, unwrap
    from dschat.models.load import load_config, load_score_backbone
    from dschat.models.reward import ScoreModel
    from dschat.models.tokenizer import ensure_distinct_pad, load_tokenizer

    log.setup(config.log_level)
    dist.init()
    set_seed(config.seed)
    config.output_dir = config.output_dir or "output/step2_reward"

    # Load. What can be wrong with names and data is found before any weight.
    with dist.main_process_first():
        name = resolve_model(config.model_name_or_path)
    trust = config.trust_remote_code
    base_config = load_config(name, "--model_name_or_path", trust)
    tokenizer = load_tokenizer(config.tokenizer_name_or_path or name, "--model_name_or_path", trust)
    ensure_distinct_pad(tokenizer)
    with dist.main_process_first():
        train_rows, held_out = preference_dataset(config, tokenizer, "both")
    train_batches, eval_batches = supervised.step_batches(config, train_rows, held_out)
    claim_output_dir(config.output_dir, config.overwrite_output_dir)

    zero = supervised.zero_settings(config)
    with sharded_loading(zero):
        model = load_score_backbone(
            name,
            "--model_name_or_path",
            zero.dtype,
            from_base="ForSequenceClassification" not in str(base_config.architectures),
            pad_token_id=tokenizer.pad_token_id,
            num_tokens=len(tokenizer),
            dropout=config.dropout,
            attn_implementation=config.attn_implementation,
            trust_remote_code=trust,
        )
    model_config, architecture = model.config, type(model).__name__
    num_steps = supervised.num_total_steps(config, train_batches)
    engine = supervised.build_engine(model, config, zero, num_steps, wrap=ScoreModel)

    # Loop.
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
