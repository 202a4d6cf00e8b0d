"""dschat's sides of `iteration.py`, through its public API with default flags."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from iteration_cases import (
    SCHEDULE_STEPS,
    Case,
    parity_reward,
    rlhf_config,
    rollout_rows,
    supervised_config,
    supervised_rows,
)
from report import clock

import dschat.distributed as dist
from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine
from dschat.config.steps import SupervisedConfig
from dschat.data.micro_batches import MicroBatchSize
from dschat.hybrid.rollout_form import RolloutForm
from dschat.inference.protocol import Answered, Generator, Rollout, SamplingParams
from dschat.models.heads import ScoreModel
from dschat.models.packing import pack
from dschat.models.tokenizer import load_tokenizer
from dschat.models.training_engine import evaluating
from dschat.runtime.deepspeed_engine import sharded_loading, zero_settings
from dschat.supervised import loop, preference, setup

Measured = dict[str, Any]


class ForcedRollout:
    """A rollout form that generates answers of the round's lengths and returns its answers.

    ``logprobs`` are the actor's of the round's answers, which a generator would return with them.
    """

    def __init__(self, form: RolloutForm) -> None:
        self._form = form
        self._generator: Generator | None = None
        self.answers: list[list[int]] = []
        self.logprobs: list[list[float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def enter(self, version: int) -> Generator:
        self._generator = self._form.enter(version)
        return self

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        lengths = [len(answer) for answer in self.answers[:: sampling.n]]
        drawn = self._generator.generate(
            prompts, replace(sampling, ignore_eos=True), indices, max_new_tokens=lengths
        )
        answers = [list(answer) for answer in self.answers]
        rollout = replace(drawn, token_ids=answers, logprobs=self.logprobs)
        for row in range(len(prompts)) if answered is not None else ():
            answered(row, rollout.part(row * sampling.n, (row + 1) * sampling.n))
        return rollout


class RLHFSide:
    """`DeepSpeedPPOTrainer` with PPO, or with GRPO and a reward function."""

    def __init__(self, case: Case, folder: Path, stage: int, **flags: Any) -> None:
        self.case = case
        config = rlhf_config(case, folder, stage, **flags)
        self.engine = DeepSpeedRLHFEngine(
            actor_model_name_or_path=config.actor_model_name_or_path,
            critic_model_name_or_path=config.critic_model_name_or_path or None,
            tokenizer=load_tokenizer(config.actor_model_name_or_path, "--actor_model_name_or_path"),
            num_total_iters=SCHEDULE_STEPS,
            args=config,
        )
        self.form = self.engine.rollout = ForcedRollout(self.engine.rollout)
        programs = [] if case.task == "ppo" else [parity_reward]
        self.trainer = DeepSpeedPPOTrainer(self.engine, config, reward_fns=programs)

    def run(self, number: int) -> Measured:
        prompts, self.form.answers = rollout_rows(self.case, number, dist.rank())
        self.form.logprobs = self._logprobs(prompts, self.form.answers)
        device = dist.device()
        started = clock(device)
        experience = self.trainer.generate_experience(prompts)
        scored = clock(device)
        generate_s = self.trainer.metrics["time/generate_s"]
        self.trainer.train_rlhf(experience)
        ended, metrics = clock(device), self.trainer.metrics
        named = {"policy": "loss/policy_avg", "value": "loss/value_avg", "kl": "loss/kl_avg"}
        return {
            "generate_s": generate_s,
            "score_s": scored - started - generate_s,
            "train_s": ended - scored,
            "iteration_s": ended - started,
            "losses": {name: metrics[key] for name, key in named.items() if key in metrics},
        }

    @torch.no_grad()
    def _logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """The actor's log-probs of ``answers``, the samples of each prompt together."""
        actor, samples = self.engine.actor, self.case.samples
        logprobs = []
        with evaluating(actor):
            for i, answer in enumerate(answers):
                prompt = prompts[i // samples]
                reads = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
                rows = pack([prompt + answer], [reads]).to(dist.device())
                logprobs.append(actor(rows, self.engine.args.temperature)[0].tolist())
        return logprobs


class SupervisedSide:
    """A `Task` of steps 1 and 2, one optimizer step a round."""

    def __init__(self, case: Case, folder: Path, stage: int, **flags: Any) -> None:
        self.case = case
        config = supervised_config(case, folder, stage, **flags)
        self.engine, self.task = make_task(case, config)
        self.size = MicroBatchSize(
            config.per_device_train_batch_size, ranks=config.sequence_parallel_size
        )

    def run(self, number: int) -> Measured:
        rows = supervised_rows(self.case, number, dist.rank())
        if self.case.is_shared and not dist.is_main_process():
            rows = []
        device = dist.device()
        started = clock(device)
        metrics, _ = loop.train_step(self.engine, self.task, rows, self.size)
        seconds = clock(device) - started
        return {
            "train_s": seconds,
            "iteration_s": seconds,
            "losses": {self.case.task: metrics["loss"]},
        }


def make_task(case: Case, config: SupervisedConfig) -> tuple[Any, Any]:
    """Engine and task, built as the step scripts do."""
    zero, num_steps = zero_settings(config), SCHEDULE_STEPS
    base = setup.read_base(config, "score" if case.task == "rm" else "lm")
    if case.task == "rm":
        with sharded_loading(zero):
            model = base.checkpoint.score_model(zero.dtype, base.tokenizer.pad_token_id)
        engine = setup.build_engine(model, config, zero, num_steps, wrap=ScoreModel)
        return engine, loop.RewardTask()

    def load(zero: Any, dropout: float | None) -> Any:
        return setup.load_policy(config, base, zero, dropout)

    engine = setup.build_engine(load(zero, None), config, zero, num_steps)
    if case.task == "sft":
        return engine, loop.SFTTask()
    reference = preference.load_reference(config, zero, load)
    return engine, preference.PreferenceTask(config, reference)
