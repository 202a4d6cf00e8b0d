"""Policy optimization: generates an experience from prompts and trains actor and critic on it.

The loss of an optimizer step is the sum over its actions / their number, over all ranks and
micro-batches, so that the update does not depend on how the batch is split.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import dschat.distributed as dist
from dschat import losses
from dschat.config import RLHFConfig, UserError
from dschat.inference.protocol import SamplingParams
from dschat.models.routing import router_metrics, routing_metrics
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.actor_loss import actor_loss
from dschat.rlhf.advantages import fill_in_advantages
from dschat.rlhf.agents import AgentCollector, agent_of
from dschat.rlhf.batching import plan_moves, settle_token_budget
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.episodes import collector_of, environment_of
from dschat.rlhf.experience import Experience, mini_batch_of
from dschat.rlhf.forwards import (
    action_values,
    fill_in,
    not_finite,
    pieces,
    update_kl,
)
from dschat.rlhf.left_out import leave_out
from dschat.rlhf.metrics import (
    experience_metrics,
    throughput,
    training_metrics,
    warn_of_gap,
)
from dschat.rlhf.prompts import PromptBatch, PromptQueue, prompt_table
from dschat.rlhf.ptx import add_text_loss, text_micro_batches
from dschat.rlhf.rollout_policies import policy_of
from dschat.rlhf.teacher_prompts import fill_in_taught
from dschat.runtime import optimizer_step
from dschat.runtime.optimizer_step import DeviceSums, OptimizerStep, SkippedSteps

logger = logging.getLogger("dschat")


class DeepSpeedPPOTrainer:
    """Generates, scores and trains with the models of ``engine``.

    Args:
        engine: the models.
        args: an `RLHFConfig`, or any namespace with some of its fields, which are copied; default:
            the engine's. Of an `RLHFConfig` later changes count (temperature, clip range, ...), or
            are refused in the next rollout: `kl`, learning rates and their schedule are read once.
        unsupervised: yields for every optimizer step this rank's rows (with ``input_ids``) of the
            pretraining loss.
        reward_fns: reward functions beside what ``args`` name and any reward model: a
            callable, a pair (callable, weight), or text as ``--reward_fn`` takes it.
        more_prompts: prompt batches that ``dynamic_sampling`` draws from where a rollout is not
            full. Without it, or once it is exhausted on a rank, the same prompts are sampled again.
        reward_functions: what ``args`` name, already loaded; excludes ``reward_fns``.
        environment, tools: a class or function, and functions; see `dschat.environments`. Default:
            what ``args`` name. Prompts must show the tools, as `prompt_dataset` does.
        agent: a function ``run(client, prompt, **columns)``, in their place.

    Attributes:
        metrics: the last iteration's numbers, under the names of metrics.jsonl.
        mini_batches: the last iteration's sums, of each mini-batch on this rank.
        iteration: number of iterations done.
        kl: the coefficient of the KL penalty.

    Raises ``UserError`` where nothing scores.
    """

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: Any = None,
        unsupervised: Iterator[list[dict[str, Any]]] | None = None,
        reward_fns: Sequence[Any] = (),
        more_prompts: Iterator[PromptBatch] | None = None,
        reward_functions: RewardFunctions | None = None,
        environment: Any = None,
        tools: Sequence[Any] = (),
        agent: Any = None,
    ) -> None:
        if reward_functions is not None and len(reward_fns):
            raise UserError(
                "give reward_fns to RewardFunctions, or to the trainer without reward_functions"
            )
        self.engine = engine
        self.args = RLHFConfig.from_namespace(args) if args is not None else engine.args
        self._began_with = vars(self.args) | self.args.chosen()
        self.kl = losses.AdaptiveKL(self.args.kl_weight, self.args.kl_target, self.args.kl_horizon)
        self.iteration = 0
        self.metrics: dict[str, float] = {}
        self.reward_functions = reward_functions or RewardFunctions(self.args, reward_fns)
        self.reward_functions.logs.trainer_state.max_steps = engine.num_iters
        source = environment_of(self.args, environment, tools)
        more = PromptQueue(more_prompts)
        found = agent_of(self.args, agent, environment, tools)
        given = engine, self.args, self.reward_functions
        if found is None:
            self.collector = collector_of(*given, source, more)
        else:
            self.collector = AgentCollector(*given, policy_of(self.args, more), found)
        self.unsupervised = unsupervised
        self.skipped = {n: SkippedSteps(self.args.max_bad_steps, n) for n in ("actor", "critic")}
        self.mini_batches: list[dict[str, float]] = []
        self._warned_of_gap = self.args.partial_rollout  # there, old policies explain the gap
        self._old_are_rollouts: bool | None = None
        # Whether the next pass measures the gap to the generator: scoring ran no actor forward.
        self._measures_gap = False

    def sampling(self) -> SamplingParams:
        """How this iteration samples; the seed changes with every iteration."""
        args = self.args
        seed = args.seed * 1_000_003 + self.iteration
        return SamplingParams.from_config(args, seed, args.num_samples_per_prompt)

    # -- experience --------------------------------------------------------------------------------

    def generate_experience(
        self, prompt_batch: PromptBatch, columns: Mapping[str, Any] | None = None
    ) -> Experience:
        """Collective. Answer this rank's prompts, score the answers, compute advantages.

        Args:
            prompt_batch: a list of id lists, or a dict with ``input_ids`` and ``attention_mask``
                (padded on either side). Ranks may have different numbers of prompts, also none.
                Reward functions, and reward models with another tokenizer, get a batch's
                ``sources``, ``texts`` and ``columns`` (see `dschat.data.batches.PromptTable`).
            columns: further columns for reward functions, each of one value per prompt.

        Returns:
            The experience. NaN or infinity in a score, log-prob or value on any rank is named in
            its ``problem``; `train_rlhf` then skips it.

        Raises:
            RewardError: a reward function failed.
        """
        started = time.perf_counter()
        self.args.require_unchanged(self._began_with)
        self.reward_functions.logs.trainer_state.global_step = self.iteration
        prompts = prompt_table(prompt_batch, columns)
        num_prompts = int(dist.sum_floats([float(len(prompts))])[0])
        num_steps = self.args.mini_batches_of(num_prompts, dist.world_size())
        e, scoring = self.collector.collect(prompts, self.sampling())
        samples = self.args.num_samples_per_prompt
        e.cut_into(num_steps, samples)
        settle_token_budget(self.engine, self.args)
        moves = None
        if self.engine.token_budget and dist.world_size() > 1:
            budget = self.engine.token_budget * self.args.sequence_parallel_size
            moves = plan_moves(e, self._mini_batches(e, epoch=0), samples, budget)
            e = moves.experience(e)
        # Before the scores: reward functions may run meanwhile.
        self._say_old_logprobs(fill_in(self.engine, e, self.args))
        e = self.collector.score(e, scoring, moves)
        taught = fill_in_taught(self.engine, e, self.args) if self.args.teacher_prompt else None
        e.problem = not_finite(e)
        clip = self.collector.clip
        weights = self.collector.weights
        rewards, corrected = fill_in_advantages(
            e, self.args, self.kl.value, max(e.num_prompts, 1), clip, weights
        )
        self.metrics = leave_out(e, self.args, self.iteration)
        if taught is not None:
            found, total = dist.sum_floats([taught, float(e.num_sequences)])
            self.metrics["objective/taught_share"] = found / max(total, 1.0)
        own = experience_metrics(e, rewards, corrected, self.engine, clip, weights)
        self.metrics |= e.metrics | own | {"objective/kl_coef": self.kl.value}
        moved = self.iteration >= self.args.critic_warmup_steps
        if moved and "objective/kl" in self.metrics and not e.problem:
            self.kl.update(self.metrics["objective/kl"], int(self.metrics["rollout/sequences"]))
        seconds = time.perf_counter() - started
        self.metrics["time/score_s"] = seconds - self.metrics["time/generate_s"]
        return e

    def _say_old_logprobs(self, are_rollouts: bool) -> None:
        """Log which log-probs are the old ones, where ``old_logprobs`` "auto" changes them."""
        if self.args.old_logprobs == "auto" and are_rollouts != self._old_are_rollouts:
            source = "the rollout's" if are_rollouts else "recomputed by the training model"
            logger.info("old log-probs: %s (--old_logprobs auto)", source)
        self._old_are_rollouts = are_rollouts

    # -- training ----------------------------------------------------------------------------------

    def train_rlhf(self, experience: Experience) -> tuple[float, float | None]:
        """Collective. Train on all epochs and mini-batches of an experience, with ptx and EMA.

        Returns:
            Mean losses of actor and critic: None without a critic, NaN where the experience has a
            ``problem`` and is skipped. `metrics` has the rest.

        Raises:
            FloatingPointError: after ``max_bad_steps`` non-finite steps in a row; a skipped
                experience counts as one.
        """
        if not isinstance(experience, Experience):
            raise UserError("train_rlhf takes the Experience that generate_experience returns")
        args, started = self.args, time.perf_counter()
        actor, critic = self.engine.actor, self.engine.critic
        self.engine.lay_schedules(args.ppo_epochs * experience.num_mini_batches)
        rate = optimizer_step.learning_rate(actor)
        warming_up = self.iteration < args.critic_warmup_steps
        for model in self.engine.trained.values():
            model.train()
        self._measures_gap = args.old_logprobs == "rollout"
        self.mini_batches.clear()
        sums: dict[str, float] = {}
        if experience.problem:
            sums = self._skip(experience)
        for epoch in range(0 if experience.problem else args.ppo_epochs):
            number = self._mini_batches(experience, epoch)
            for m in range(experience.num_mini_batches):
                rows = [int(i) for i in (number == m).nonzero()[0]]
                part = self._mini_batch(experience, rows, train_actor=not warming_up)
                self.mini_batches.append(part)
                _add(sums, part)
        self.metrics |= training_metrics(sums) | router_metrics(actor) | routing_metrics(actor)
        if not (warming_up or experience.problem):
            self.metrics |= update_kl(self.engine, experience, args)
            routing_metrics(actor)  # the experts of this forward are not counted
        self._warned_of_gap = self._warned_of_gap or warn_of_gap(
            self.metrics, self.engine.dtype, self.args.rollout_backend
        )
        self.metrics["policy/learning_rate"] = rate
        if actor.fp16_enabled():
            self.metrics["policy/loss_scale"] = optimizer_step.loss_scale(actor)
            if critic is not None:
                self.metrics["val/loss_scale"] = optimizer_step.loss_scale(critic)
        self.metrics["time/train_s"] = time.perf_counter() - started
        self.metrics |= throughput(
            self.metrics, experience, self.engine, train_actor=not warming_up
        )
        self.iteration += 1
        return self.metrics["loss/policy_avg"], self.metrics.get("loss/value_avg")

    def _mini_batches(self, e: Experience, epoch: int) -> np.ndarray:
        """The mini-batch of each sequence: (S,) int64."""
        seed = [self.args.seed, self.iteration, epoch]
        return mini_batch_of(e.numbers, e.num_mini_batches, seed, e.together)

    def require_learned(self) -> None:
        """At the end of a run: raise ``FloatingPointError`` where every actor step was skipped."""
        self.skipped["actor"].require_some(any_applied=self.engine.version > 0)

    def _skip(self, experience: Experience) -> dict[str, float]:
        """Count ``experience`` as a bad step; its sums of metrics."""
        when = f"iteration {self.iteration}: the update"
        self.skipped["actor"].count(when, experience.problem)
        sums = {"bad_steps": 1.0, "policy_loss": math.nan, "policy_count": 1.0}
        if self.engine.critic is not None:
            sums |= {"value_loss": math.nan, "actions": 1.0}
        return sums

    def _mini_batch(
        self, experience: Experience, rows: list[int], train_actor: bool
    ) -> dict[str, float]:
        """Collective. One optimizer step of actor and any critic; ``rows``: this rank's."""
        # NOTE: every rank runs the same collectives in this order, also without rows: the sums, the
        # numbers of micro-batches and of the text's, the actor's forwards, backwards and step, then
        # the critic's. What is left out depends on flags and on sums over all ranks alone.
        num_actions = float(experience.scored_mask[rows].sum()) if rows else 0.0
        policy_count = float(
            losses.aggregation_count(experience.loss_mask[rows], self.args.aggregation)
        )
        all_actions, all_policy = dist.sum_floats([num_actions, policy_count])
        size = self.args.per_device_training_batch_size
        # All on the device before the first forward: a copy from host memory waits for the device.
        batches = [batch for _, batch in pieces(self.engine, experience, size, rows)]
        sums = {"actions": num_actions, "policy_count": policy_count}
        parts: list[DeviceSums] = []
        if train_actor and not all_policy:
            logger.warning(
                "iteration %d: a step without a scored answer is left out", self.iteration
            )
            train_actor = False
        text = text_micro_batches(self.engine, self.unsupervised, size) if train_actor else []
        steps: dict[str, OptimizerStep] = {}
        if train_actor:
            num_batches = len(batches) + len(text)
            step = steps["actor"] = OptimizerStep(self.engine.actor, num_batches, all_policy)
            parts += [self._actor_micro_batch(step, batch) for batch in batches]
            self._measures_gap = False  # the step changes the actor
            parts += add_text_loss(self.engine, step, text, self.args.unsup_coef, all_policy)
            if not (self.args.align_overflow and self.engine.critic is not None):
                step.finish()  # frees its gradients before the critic's are computed
        if self.engine.critic is not None:
            sums["value_loss"] = 0.0
            if all_actions > 0:  # else moments of earlier steps alone would move it
                step = OptimizerStep(self.engine.critic, len(batches), all_actions)
                steps["critic"] = step
                parts += [self._critic_micro_batch(step, batch) for batch in batches]
            unfinished = [step for step in steps.values() if step.outcome is None]
            optimizer_step.finish_together(unfinished)
        _add(sums, optimizer_step.sum_parts(parts))
        for name, step in steps.items():
            _add(sums, self._record(step, name))
        return sums

    def _actor_micro_batch(self, step: OptimizerStep, batch: Experience) -> DeviceSums:
        """Backward of the actor's loss; sums of metrics."""
        gap = self._measures_gap
        loss, sums = actor_loss(self.engine, self.args, batch, self.kl.value, gap)
        step.backward(loss)
        return sums

    def _critic_micro_batch(self, step: OptimizerStep, batch: Experience) -> DeviceSums:
        """Backward of the value loss; sums of metrics."""
        assert self.engine.critic is not None
        values = action_values(self.engine.critic, batch)
        loss, metrics = losses.value_loss(
            values, batch.values, batch.returns, batch.scored_mask, self.args.cliprange_value
        )
        step.backward(loss)
        return {"value_clipped": metrics["value_clipped"], "value_loss": loss.detach()}

    def _record(self, step: OptimizerStep, name: str) -> dict[str, float]:
        """Update version and average after an applied step, or count a skipped one."""
        self.skipped[name].take(step, f"iteration {self.iteration}: a step")
        if step.outcome != "applied":
            return {"bad_steps" if step.outcome == "bad" else "overflow_steps": 1.0}
        if name == "actor":
            self.engine.version += 1
            if self.engine.ema is not None:
                self.engine.ema.update()
        return {f"{name}_grad_norm": step.grad_norm, f"{name}_steps": 1.0}


def _add(sums: dict[str, float], part: dict[str, float]) -> None:
    for name, value in part.items():
        sums[name] = sums.get(name, 0.0) + value
