"""Step 3, RLHF: the actor answers prompts, a reward model or functions score, the actor learns.

    deepspeed step3_rlhf/main.py --actor_model_name_or_path output/step1_sft \\
        --critic_model_name_or_path output/step2_reward
    deepspeed step3_rlhf/main.py --actor_model_name_or_path output/step1_sft \\
        --advantage_estimator grpo --num_samples_per_prompt 8 --reward_fn my_rewards.py:score
    python step3_rlhf/main.py --help

The loop below is the one the README shows for notebooks.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup.interrupts import exit_on_interrupt

    exit_on_interrupt()

import dschat.distributed as dist
from dschat.config import RLHFConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    args = parser.parse(RLHFConfig)

    from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine
    from dschat.data.batches import PromptBatches, check_same_rows, prompt_columns
    from dschat.data.tokenize import prompt_dataset
    from dschat.distributed import stop_signals
    from dschat.observability import console
    from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
    from dschat.rlhf.episodes import ENVIRONMENT, environment_of
    from dschat.rlhf.evaluation import HeldOutPrompts, check_evaluation
    from dschat.rlhf.initial_checkpoints import check_lengths, find_checkpoints
    from dschat.rlhf.ptx import unsupervised_steps
    from dschat.rlhf.reporter import Reporter
    from dschat.runtime.checkpointing import training_checkpointer
    from dschat.runtime.deepspeed_engine import zero_settings
    from dschat.runtime.output_dir import claim_output_dir, mark_complete, record_of
    from dschat.runtime.start import start_step

    start_step(args, "output/step3_rlhf")
    for model in args.deepspeed_models:
        zero_settings(args, model)  # raises for a wrong DeepSpeed file

    # Load. Mistakes in names and data show before any weight loads.
    names = args.actor_model_name_or_path, args.critic_model_name_or_path or None
    checkpoints = find_checkpoints(*names, args)
    check_lengths(checkpoints)
    tokenizer = checkpoints.tokenizer
    environment = environment_of(args)
    tools = environment.schemas if environment else None
    with dist.main_process_first():
        prompts, held_out = prompt_dataset(args, tokenizer, "both", tools=tools)
        unsupervised = unsupervised_steps(args, tokenizer)
    check_same_rows(prompts, held_out)
    functions = RewardFunctions.of(args)
    for table in (prompts, *([held_out] if len(held_out) else [])):
        functions.check_columns(prompt_columns(table))
    sources = [*([REWARD_MODEL] if checkpoints.reward else []), *functions.names]
    if environment and environment.rewards:
        sources.append(ENVIRONMENT)
    check_evaluation(args, sources, len(held_out))
    prompt_train_dataloader = PromptBatches(
        prompts, args.rollout_prompts(dist.world_size()), dist.rank(), dist.world_size(), args.seed
    )
    num_iters = args.max_steps or args.num_train_epochs * len(prompt_train_dataloader)

    engine = DeepSpeedRLHFEngine(
        actor_model_name_or_path=names[0],
        critic_model_name_or_path=names[1],
        tokenizer=tokenizer,
        num_total_iters=num_iters,
        args=args,
        checkpoints=checkpoints,
    )
    prompt_batches = prompt_train_dataloader.endless()  # epoch after epoch
    trainer = DeepSpeedPPOTrainer(
        engine=engine,
        args=args,
        unsupervised=unsupervised,
        more_prompts=prompt_batches,
        reward_functions=functions,
    )

    # Loop.
    claim_output_dir(args.output_dir, bool(args.resume), record_of(args))
    console.release()
    held_out = HeldOutPrompts.of(held_out, args)
    report = Reporter(trainer, held_out, num_iters, prompt_train_dataloader.num_rows)
    with training_checkpointer(args) as checkpointer:
        report.begin(checkpointer)
        while trainer.iteration < num_iters:
            out = trainer.generate_experience(next(prompt_batches))
            actor_loss, critic_loss = trainer.train_rlhf(out)
            report.step(out)
        trainer.require_learned()

        # Save, before an evaluation in which a reward function may fail. A signal waits for it.
        with stop_signals.handle_stop_signals(args.output_dir):
            engine.save(args.output_dir)
        console.logger.info("saved %s", args.output_dir)
        report.evaluate()
    report.close()
    mark_complete(args.output_dir)
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
