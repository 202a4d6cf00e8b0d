"""Step 1, supervised fine-tuning: a pretrained causal LM learns from demonstrations.

deepspeed step1_sft/main.py --model_name_or_path facebook/opt-1.3b --zero_stage 3
python step1_sft/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.interrupts import exit_on_interrupt

    exit_on_interrupt()

import dschat.distributed as dist
from dschat.config import SFTConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. Only then does torch load: --help and typing errors answer at once.
    config = parser.parse(SFTConfig)

    from transformers import set_seed

    from dschat.builtin.tiny_model import resolve_model
    from dschat.checkpoint.compatibility import check_start
    from dschat.data.tokenize import sft_dataset
    from dschat.inference.hf_generator import HuggingFaceGenerator
    from dschat.launch.finished_steps import record_of
    from dschat.models.load import load_causal_lm, load_config
    from dschat.models.model_kind import require_causal_lm
    from dschat.models.tokenizer import stop_ids
    from dschat.models.vocabulary import match_vocabulary, num_ids
    from dschat.observability import console
    from dschat.observability.metrics_log import MetricsLog, check_sinks
    from dschat.runtime.deepspeed_engine import sharded_loading, unwrap
    from dschat.runtime.gold_eval import gold_knows, sample_gold
    from dschat.runtime.output_dir import check_output_dir, claim_output_dir
    from dschat.supervised import loop, setup, tasks

    console.setup(config.log_level, hold=True)
    dist.init()
    set_seed(config.seed)
    config.output_dir = config.output_dir or "output/step1_sft"
    check_output_dir(config.output_dir, config.overwrite_output_dir, vars(config))
    check_start(config)
    check_sinks(config)
    zero = setup.zero_settings(config)

    # Load. What can be wrong with names and data is found before any weight.
    with dist.main_process_first():
        name = resolve_model(config.model_name_or_path)
    trust = config.trust_remote_code
    model_config = load_config(name, "--model_name_or_path", trust)
    require_causal_lm(model_config, name, "--model_name_or_path")
    tokenizer = setup.load_tokenizer_of_base(config, name, model_config, "lm")
    with dist.main_process_first():
        train_rows, held_out = sft_dataset(config, tokenizer, "both")
    train_batches, eval_batches = setup.step_batches(config, train_rows, held_out)

    with sharded_loading(zero):
        model = load_causal_lm(
            name,
            "--model_name_or_path",
            zero.dtype,
            config.dropout,
            config.attn_implementation,
            trust,
            num_ids(tokenizer),
        )
    frozen = bool(config.lora_dim) and config.only_optimize_lora
    match_vocabulary(model_config, model.config, frozen)
    architecture = type(model).__name__
    stops = stop_ids(tokenizer, model.generation_config)
    num_steps = loop.num_total_steps(config, train_batches)
    engine = setup.build_engine(model, config, zero, num_steps)

    # Loop.
    claim_output_dir(config.output_dir, bool(config.resume), record_of(config))
    console.release()
    metrics_log = MetricsLog(config.output_dir, config)
    task = tasks.SFTTask(tokenizer.pad_token_id)
    judged = gold_knows(config.data_path) and not zero.shards_parameters
    generator = HuggingFaceGenerator(
        unwrap(engine), stops, tokenizer.pad_token_id, num_tokens=num_ids(tokenizer)
    )
    if judged:
        metrics_log.write(0, sample_gold(generator, tokenizer, config.max_eval_samples))
    loop.train(engine, task, config, train_batches, eval_batches, metrics_log)
    if judged:
        gold = sample_gold(generator, tokenizer, config.max_eval_samples)
        metrics_log.write(num_steps, gold)
        console.logger.info("gold score of sampled answers: %.3f", gold["eval/gold"])
    metrics_log.close()

    # Save.
    setup.save(unwrap(engine), config, model_config, tokenizer, architecture, stops)
    console.logger.info("saved %s", config.output_dir)
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
