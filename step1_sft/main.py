"""Step 1, supervised fine-tuning: trains a pretrained causal LM on demonstrations.

deepspeed step1_sft/main.py --model_name_or_path facebook/opt-1.3b --zero_stage 3
python step1_sft/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

from functools import partial

import dschat.distributed as dist
from dschat.config import SFTConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    config = parser.parse(SFTConfig)

    from dschat.data.tokenize import sft_dataset
    from dschat.runtime.deepspeed_engine import unwrap, zero_settings
    from dschat.runtime.gold_eval import GoldEvaluation
    from dschat.runtime.output_dir import mark_complete
    from dschat.runtime.start import start_step
    from dschat.supervised import loop, setup, tasks

    start_step(config, "output/step1_sft")
    zero = zero_settings(config)

    # Load. Mistakes in names and data show before any weight loads.
    base = setup.read_base(config, "lm")
    with dist.main_process_first():
        tables = sft_dataset(config, base.tokenizer, "both")
    batches = setup.step_batches(config, *tables)
    model = setup.load_policy(config, base, zero, config.dropout)
    files = setup.policy_files(config, base, model)
    num_steps = loop.num_total_steps(config, batches[0])
    engine = setup.build_engine(model, config, zero, num_steps)
    task = tasks.SFTTask()
    setup.settle_micro_batches(config, engine, task, *batches)

    # Loop, and save.
    metrics_log = setup.claim_output(config)
    gold = GoldEvaluation(
        unwrap(engine), base.tokenizer, files.stop_ids, config, zero.shards_parameters
    )
    gold.log(metrics_log, 0)
    save = partial(setup.save, engine, config, files)
    loop.train(engine, task, config, *batches, metrics_log, save)
    gold.log(metrics_log, num_steps)
    metrics_log.close()
    mark_complete(config.output_dir)
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
