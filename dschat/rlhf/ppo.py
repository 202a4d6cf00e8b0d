"""PPO on one engine: make an experience from prompts, learn from it.

Prompt ids come in; optimizer steps on actor and critic, and a dict of metrics, go out. It must not
know where prompts come from, how weights are sharded or which generator answers.

The loss of an optimizer step is a sum over its action tokens / their number, over all ranks and
micro-batches; so the update is the same however the batch is cut.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from dschat import dist
from dschat.config import RLHFConfig, UserError
from dschat.data.collate import pad_right
from dschat.losses import (
    AdaptiveKL,
    entropy_from_logits,
    gae,
    lm_loss,
    masked_whiten_stats,
    policy_loss,
    token_logprobs,
    value_loss,
    whiten,
)
from dschat.optimizer_step import SkippedSteps, Step, finish_together, learning_rate, loss_scale
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import (
    Experience,
    chunks,
    from_rollout,
    gather_actions,
    mini_batch_of,
)
from dschat.rlhf.reporting import (
    experience_metrics,
    generation_metrics,
    throughput,
    training_metrics,
)
from dschat.rlhf.rewards import token_rewards
from dschat.rollout import SamplingParams, prompt_problem

logger = logging.getLogger("dschat")

PromptBatch = list[list[int]] | Mapping[str, Tensor]


def action_logprobs(
    model: nn.Module, batch: Experience, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One forward of ``model``: log-probs of the actions, and entropies; (B, A) fp32 each."""
    first = int(batch.prompt_lengths.min()) - 1  # no column before this predicts an action
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, first:-1]
    num_actions = batch.answer_mask.shape[1]
    logprobs = token_logprobs(logits, batch.input_ids[:, first + 1 :], temperature)
    gathered = gather_actions(logprobs, batch.prompt_lengths, num_actions, first)
    if not with_entropy:
        return gathered, None
    entropy = entropy_from_logits(logits, temperature)
    return gathered, gather_actions(entropy, batch.prompt_lengths, num_actions, first)


def action_values(critic: nn.Module, batch: Experience) -> Tensor:
    """The critic's value before each action: (B, A) fp32."""
    return gather_actions(critic(batch.input_ids), batch.prompt_lengths, batch.answer_mask.shape[1])


class DeepSpeedPPOTrainer:
    """Generates, scores and learns with the models of ``engine``.

    ``args`` is an `RLHFConfig` or any namespace with some of its fields. ``unsupervised``, if
    given, yields for every optimizer step the micro-batches (lists of rows with ``input_ids``) of
    the pretraining loss. ``metrics`` holds the last iteration's numbers under the names of
    metrics.jsonl.
    """

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: Any = None,
        unsupervised: Iterator[list[list[dict[str, Any]]]] | None = None,
    ) -> None:
        self.engine = engine
        self.args = RLHFConfig.from_namespace(args) if args is not None else engine.args
        self.kl = AdaptiveKL(self.args.kl_coef, self.args.kl_target, self.args.kl_horizon)
        self.iteration = 0
        self.metrics: dict[str, float] = {}
        self._unsupervised = unsupervised
        self._skipped = {n: SkippedSteps(self.args.max_bad_steps, n) for n in ("actor", "critic")}
        self._device = dist.device()

    def sampling(self) -> SamplingParams:
        """How this iteration samples; the seed changes with every iteration."""
        args = self.args
        return SamplingParams(
            max_new_tokens=args.max_answer_seq_len,
            min_new_tokens=args.min_answer_seq_len,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed * 1_000_003 + self.iteration,
            n=args.num_samples_per_prompt,
        )

    # -- experience --------------------------------------------------------------------------------

    def generate_experience(self, prompt_batch: PromptBatch) -> Experience:
        """Collective. Answer this rank's prompts and score the answers.

        ``prompt_batch``: a list of id lists, or a dict with ``input_ids`` and ``attention_mask``
        (padded on either side). Ranks may bring different numbers of prompts, none included. A
        batch's ``sources`` (see `Prompts`) are what a reward model with another tokenizer reads.
        """
        prompts = _prompt_lists(prompt_batch)
        started = time.perf_counter()
        first = sum(dist.gather_objects(len(prompts))[: dist.rank()])
        sampling = self.sampling()
        indices = list(range(first, first + len(prompts)))
        with self.engine.rollout_mode() as generator:
            rollout = generator.generate(prompts, sampling, indices)
            generation = generation_metrics(self.engine.rollout.last_refresh, generator)
        generated = time.perf_counter()
        repeated = [p for p in prompts for _ in range(sampling.n)]
        sources = getattr(prompt_batch, "sources", None)
        if sources is not None:
            sources = [source for source in sources for _ in range(sampling.n)]
        pad_id = self.engine.tokenizer.pad_token_id
        experience = from_rollout(repeated, rollout, pad_id, first * sampling.n, sources)
        self._score(experience)
        self.metrics = self._advantages(experience)
        self.metrics |= generation | {
            "time/generate_s": generated - started,
            "time/score_s": time.perf_counter() - generated,
        }
        return experience

    @torch.no_grad()
    def _score(self, experience: Experience) -> None:
        """Collective. Fill in log-probs, values and scores, by as many forwards on every rank."""
        size = self.args.per_device_training_batch_size
        rows = list(range(experience.num_sequences))
        count = dist.max_int(-(-len(rows) // size))
        models = (self.engine.actor, self.engine.critic)
        modes = [model.training for model in models]
        for model in models:
            model.eval()
        for part in chunks(rows, size, count):
            batch = experience.take(part, self._device)
            logprobs, entropy = action_logprobs(
                self.engine.actor, batch, self.args.temperature, with_entropy=True
            )
            with self.engine.reference() as reference:
                ref_logprobs, _ = action_logprobs(reference, batch, self.args.temperature)
            values = action_values(self.engine.critic, batch)
            scores = self.engine.score(batch)
            if not part:
                continue
            experience.scores[part] = scores.cpu()
            width = batch.answer_mask.shape[1]
            for name, value in (
                ("logprobs", logprobs),
                ("entropy", entropy),
                ("ref_logprobs", ref_logprobs),
                ("values", values),
            ):
                masked = torch.where(batch.answer_mask, value, 0.0)
                getattr(experience, name)[part, :width] = masked.cpu()
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)

    def _advantages(self, e: Experience) -> dict[str, float]:
        """Collective. Rewards, GAE and whitening over the whole experience; returns its metrics."""
        args = self.args
        rewards, _ = token_rewards(
            e.scores, e.logprobs, e.ref_logprobs, e.answer_mask, e.finished, self.kl.value, args
        )
        e.advantages, e.returns = gae(rewards, e.values, e.answer_mask, args.gamma, args.lam)
        if args.whiten_advantages:
            stats = torch.stack(masked_whiten_stats(e.advantages, e.answer_mask))
            e.advantages = whiten(e.advantages, e.answer_mask, *dist.all_reduce_sum(stats))
        metrics = experience_metrics(e, rewards) | {"objective/kl_coef": self.kl.value}
        self.kl.update(metrics["objective/kl"], int(metrics["rollout/sequences"]))
        return metrics

    # -- learning ----------------------------------------------------------------------------------

    def train_rlhf(self, experience: Experience) -> tuple[float, float]:
        """Collective. All epochs and mini-batches of an experience; ptx, EMA and KL control
        included.

        Returns the mean actor and critic losses; `metrics` has the rest. Raises
        ``FloatingPointError`` after ``max_bad_steps`` steps in a row whose gradient is not finite.
        """
        if not isinstance(experience, Experience):
            raise UserError("train_rlhf learns from what generate_experience returned")
        args, started = self.args, time.perf_counter()
        rate = learning_rate(self.engine.actor)
        warming_up = self.iteration < args.critic_warmup_steps
        self.engine.actor.train()
        self.engine.critic.train()
        sums: dict[str, float] = {}
        for epoch in range(args.ppo_epochs):
            number = mini_batch_of(
                experience.num_sequences,
                experience.first_index,
                args.num_mini_batches,
                [args.seed, self.iteration, epoch],
            )
            for m in range(args.num_mini_batches):
                rows = [int(i) for i in (number == m).nonzero()[0]]
                part = self._mini_batch(experience, rows, train_actor=not warming_up)
                for name, value in part.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.metrics |= training_metrics(sums)
        self.metrics["policy/learning_rate"] = rate
        if self.engine.actor.fp16_enabled():
            self.metrics["policy/loss_scale"] = loss_scale(self.engine.actor)
            self.metrics["val/loss_scale"] = loss_scale(self.engine.critic)
        self.metrics["time/train_s"] = time.perf_counter() - started
        self.metrics |= throughput(
            self.metrics, experience, self.engine, train_actor=not warming_up
        )
        self.iteration += 1
        return self.metrics["loss/policy_avg"], self.metrics["loss/value_avg"]

    def _mini_batch(
        self, experience: Experience, rows: list[int], train_actor: bool
    ) -> dict[str, float]:
        """Collective. An optimizer step of actor and critic on this rank's ``rows``."""
        size = self.args.per_device_training_batch_size
        count = dist.max_int(max(1, -(-len(rows) // size)))
        num_tokens = float(experience.answer_mask[rows].sum()) if rows else 0.0
        (denominator,) = dist.sum_floats([num_tokens])
        parts = chunks(rows, size, count)
        sums = {"actions": num_tokens}
        text = next(self._unsupervised) if self._unsupervised is not None and train_actor else []
        steps: dict[str, Step] = {}
        if train_actor:
            step = steps["actor"] = Step(self.engine.actor, count + len(text), denominator)
            for part in parts:
                _add(sums, self._actor_micro_batch(step, experience.take(part, self._device)))
            _add(sums, self._ptx_micro_batches(step, text, denominator))
            if not self.args.align_overflow:
                step.finish()  # its gradients go before the critic's come
        step = steps["critic"] = Step(self.engine.critic, count, denominator)
        for part in parts:
            _add(sums, self._critic_micro_batch(step, experience.take(part, self._device)))
        finish_together([step for step in steps.values() if step.outcome is None])
        for name, step in steps.items():
            _add(sums, self._taken(step, name))
        return sums

    def _actor_micro_batch(self, step: Step, batch: Experience) -> dict[str, float]:
        logprobs, _ = action_logprobs(self.engine.actor, batch, self.args.temperature)
        loss, metrics = policy_loss(
            logprobs, batch.logprobs, batch.advantages, batch.answer_mask, self.args.cliprange
        )
        step.backward(loss)
        named = {f"policy_{name}": float(value) for name, value in metrics.items()}
        return named | {"policy_loss": float(loss.detach())}

    def _critic_micro_batch(self, step: Step, batch: Experience) -> dict[str, float]:
        values = action_values(self.engine.critic, batch)
        loss, metrics = value_loss(
            values, batch.values, batch.returns, batch.answer_mask, self.args.cliprange_value
        )
        step.backward(loss)
        return {
            "value_clipped": float(metrics["value_clipped"]),
            "value_loss": float(loss.detach()),
        }

    def _ptx_micro_batches(
        self, step: Step, text: list[list[dict[str, Any]]], denominator: float
    ) -> dict[str, float]:
        """Collective. ``unsup_coef`` x the token mean of the pretraining loss, in the same step."""
        if not text:
            return {}
        pad_id = self.engine.tokenizer.pad_token_id
        batches = [
            pad_right([row["input_ids"] for row in rows] or [[pad_id]], pad_id) for rows in text
        ]
        real = [float(mask[:, 1:].sum()) for _, mask in batches]
        (num_tokens,) = dist.sum_floats([sum(real)])
        # `step` divides by the action tokens; this puts the text's own count in their place.
        weight = self.args.unsup_coef * max(denominator, 1.0) / max(num_tokens, 1.0)
        total = 0.0
        for ids, mask in batches:
            ids, mask = ids.to(self._device), mask.to(self._device)
            logits = self.engine.actor(input_ids=ids, use_cache=False).logits
            loss, _ = lm_loss(logits, ids, mask)
            step.backward(weight * loss)
            total += float(loss.detach())
        return {"ptx_loss": total, "ptx_tokens": sum(real)}

    def _taken(self, step: Step, name: str) -> dict[str, float]:
        """What a finished step changed: version and average, or the counts of skipped ones."""
        self._skipped[name].take(step, f"iteration {self.iteration}: a step")
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


def _prompt_lists(batch: PromptBatch) -> list[list[int]]:
    """Prompts without padding, whichever form they came in; ``UserError`` where it is none."""
    if not isinstance(batch, Mapping):
        prompts = [p.tolist() if isinstance(p, Tensor) else p for p in batch]
        for problem in filter(None, map(prompt_problem, count(), prompts)):
            raise UserError(problem)
        return [list(map(int, prompt)) for prompt in prompts]
    if "input_ids" not in batch:
        raise UserError(f"a prompt batch needs input_ids; it has {', '.join(map(str, batch))}")
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None:
        return ids.tolist()
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
