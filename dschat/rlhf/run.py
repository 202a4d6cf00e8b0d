"""A whole run of step 3: checks, models, the loop, checkpoints, evaluation, the saved models."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.data.batches import Endless, PromptBatches, check_same_rows, prompt_columns
from dschat.data.tokenize import prompt_dataset
from dschat.distributed import stop_signals
from dschat.observability import console
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rlhf.agents import AGENT, agent_of
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.episodes import ENVIRONMENT, environment_of
from dschat.rlhf.evaluation import HeldOutPrompts, check_evaluation
from dschat.rlhf.formulas import estimator, policy_loss
from dschat.rlhf.initial_checkpoints import check_lengths, find_checkpoints
from dschat.rlhf.kept_rollouts import KeptRollouts
from dschat.rlhf.prompt_sampling import AdaptivePrompts, difficulties
from dschat.rlhf.ptx import unsupervised_steps
from dschat.rlhf.reporter import Reporter
from dschat.rlhf.run_state import Run
from dschat.rlhf.teacher_prompts import teacher_prompt
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.checkpointing import training_checkpointer
from dschat.runtime.deepspeed_engine import zero_settings
from dschat.runtime.hub import publish
from dschat.runtime.output_dir import claim_output_dir, mark_complete, record_of
from dschat.runtime.start import start_step, warn_of_few_steps


def train(
    args: RLHFConfig,
    reward_fns: Sequence[Any] = (),
    environment: Any = None,
    tools: Sequence[Any] = (),
    agent: Any = None,
    callbacks: Sequence[Any] = (),
) -> DeepSpeedPPOTrainer:
    """Collective. Train an actor as ``args`` say, and save it; returns the trainer, still loaded.

    Args:
        reward_fns, environment, tools, agent: Python objects in addition to what ``args`` name; see
            `DeepSpeedPPOTrainer`.
        callbacks: likewise; see `dschat.runtime.start`.

    Raises:
        UserError: before weights load, for a mistake in settings, names or data.
        TrainingStopped: after a checkpoint, where the run was asked to stop.
        FloatingPointError: see `DeepSpeedPPOTrainer.train_rlhf`.
    """
    call = start_step(args, callbacks)
    output_dir = str(args.output_dir)
    estimator(args.advantage_estimator)  # raises for a function that does not fit
    policy_loss(args.policy_loss)
    if args.teacher_prompt:
        teacher_prompt(args.teacher_prompt)
    for model in args.deepspeed_models:
        zero_settings(args, model)  # raises for a wrong DeepSpeed file

    # Load. Mistakes in names and data show before any weight loads.
    names = args.actor_model_name_or_path, args.critic_model_name_or_path or None
    checkpoints = find_checkpoints(*names, args)
    check_lengths(checkpoints)
    tokenizer = checkpoints.tokenizer
    has_agent = agent_of(args, agent, environment, tools) is not None
    episodes = environment_of(args, environment, tools)
    schemas = episodes.schemas if episodes else None
    with dist.main_process_first():
        prompts, held_out = prompt_dataset(args, tokenizer, "both", tools=schemas)
        unsupervised = unsupervised_steps(args, tokenizer)
    check_same_rows(prompts, held_out)
    functions = RewardFunctions(args, reward_fns)
    for table in (prompts, *([held_out] if len(held_out) else [])):
        functions.check_columns(prompt_columns(table))
    sources = [*([REWARD_MODEL] if checkpoints.reward else []), *functions.names]
    if episodes and episodes.rewards:
        sources.append(ENVIRONMENT)
    if has_agent:
        sources.append(AGENT)
    check_evaluation(args, sources, len(held_out))
    rank, world = dist.rank(), dist.world_size()
    found = min(args.rollout_prompts(world), len(prompts))
    if (size := args.divisible_prompts(found, world)) < found:
        text = "%d prompts do not fill a rollout: iterations take %d, which fill optimizer steps"
        console.logger.info(text, found, size)
    kind, _, column = args.prompt_sampling.partition(":")
    ordered_by = difficulties(prompts, column) if kind == "curriculum" else None
    prompt_train_dataloader = PromptBatches(prompts, size, rank, world, args.seed, ordered_by)
    num_iters = args.max_steps or args.num_train_epochs * len(prompt_train_dataloader)
    num_steps = num_iters * args.ppo_epochs * args.mini_batches_of(size, world)
    warn_of_few_steps(args, num_steps, "per_device_generation_batch_size")

    engine = DeepSpeedRLHFEngine(
        actor_model_name_or_path=names[0],
        critic_model_name_or_path=names[1],
        tokenizer=tokenizer,
        num_total_iters=num_iters,
        args=args,
        checkpoints=checkpoints,
    )
    prompt_batches: Endless | AdaptivePrompts = Endless(prompt_train_dataloader)  # all epochs
    if kind == "adaptive":
        prompt_batches = AdaptivePrompts(prompt_train_dataloader, args.num_samples_per_prompt)
    trainer = DeepSpeedPPOTrainer(
        engine=engine,
        args=args,
        unsupervised=unsupervised,
        more_prompts=prompt_batches,
        reward_functions=functions,
        environment=environment,
        tools=tools,
        agent=agent,
    )

    # Loop.
    claim_output_dir(output_dir, bool(args.resume), record_of(args))
    console.release()
    held_out = HeldOutPrompts.of(held_out, args)
    report = Reporter(trainer, held_out, num_iters, call)
    rollouts = KeptRollouts(output_dir, args.keep_rollouts)
    run = Run(trainer, report, len(prompts))
    with training_checkpointer(args, partial(engine.save, output_dir)) as checkpointer:
        checkpointer.begin(run.state(), num_iters, run.load_state_dict)
        report.begin()
        rollouts.begin(trainer)
        while trainer.iteration < num_iters:
            out = trainer.generate_experience(next(prompt_batches))
            call("on_rollout", trainer, out)
            rollouts.keep(trainer, out)
            actor_loss, critic_loss = trainer.train_rlhf(out)
            checkpointer.leave()
            report.step(out, partial(checkpointer.after, state=run.state))
        trainer.require_learned()

        # Save, before an evaluation in which a reward function may fail. A signal waits for it.
        with stop_signals.handle_stop_signals(output_dir):
            engine.save(output_dir)
        console.logger.info("saved %s", output_dir)
        call("on_save", trainer, output_dir)
        report.evaluate()
    call("on_end", trainer)
    report.close()
    mark_complete(output_dir)
    publish(args)
    return trainer
