"""Step 3 the DeepSpeed-Chat way, a side of `iteration.py`: everything is padded.

Plain Hugging Face models under DeepSpeed engines of the same ZeRO stage and optimizer. Prompts are
padded on the left to the maximum prompt length, answers on the right to the maximum answer length;
every model computes all columns, and the language-model head all logits. PPO as in DeepSpeed-Chat:
KL and clipped score in the reward, GAE, clipped losses of actor and critic. GRPO, which
DeepSpeed-Chat does not have, in the same way. The losses are written here a second time: a test
holds them against dschat's. P columns of prompt, A of answer, T = P + A.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from iteration_cases import (
    PAD,
    SCHEDULE_STEPS,
    Case,
    parity_scores,
    rlhf_config,
    rollout_rows,
)
from report import clock
from rollout_sides import LengthPerRow
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    StoppingCriteriaList,
)

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.rlhf.experience import mini_batch_of
from dschat.runtime.deepspeed_engine import (
    initialize_frozen,
    initialize_training,
    sharded_loading,
    unwrap,
    zero_settings,
)


@dataclass
class Padded:
    """Sequences padded to one width: ids (B, T) int64, mask (B, T) bool, True at real tokens."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], width: int, left: bool = False) -> "Padded":
        ids = torch.full((len(rows), width), PAD)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            columns = slice(width - len(row), width) if left else slice(len(row))
            ids[i, columns] = torch.tensor(row)
            mask[i, columns] = True
        return cls(ids.to(dist.device()), mask.to(dist.device()))

    def inputs(self) -> dict[str, Any]:
        """What a model's forward takes; positions count real tokens."""
        mask = self.mask.long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": self.ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": False,
        }

    def __getitem__(self, rows: Tensor | slice) -> "Padded":
        return Padded(self.ids[rows], self.mask[rows])


class ScoreEveryColumn(nn.Module):
    """A sequence classifier's score at every column: (B, T) fp32."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, **inputs: Any) -> Tensor:
        backbone = getattr(self.classifier, self.classifier.base_model_prefix)
        hidden = backbone(**inputs).last_hidden_state
        return self.classifier.score(hidden).squeeze(-1).float()


def next_logprobs(model: Any, batch: Padded) -> Tensor:
    """Log-prob of the token after every column but the last: (B, T - 1) fp32."""
    logits = model(**batch.inputs()).logits[:, :-1]
    logprobs = F.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, batch.ids[:, 1:].unsqueeze(-1)).squeeze(-1)


# -- arithmetic ------------------------------------------------------------------------------------


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def clipped_policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, epsilon: float
) -> Tensor:
    ratio = ((logprobs - old) * mask).exp()
    plain, clipped = advantages * ratio, advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    return -masked_mean(torch.minimum(plain, clipped), mask)


def clipped_value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, epsilon: float
) -> Tensor:
    clipped = values.clamp(old - epsilon, old + epsilon)
    worst = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * masked_mean(worst, mask)


def generalized_advantages(
    rewards: Tensor, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, A); rewards and values are 0 after the end of an answer."""
    reversed_advantages: list[Tensor] = []
    last = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(last)
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def group_advantages(scores: Tensor, samples: int) -> Tensor:
    """GRPO's: scores normalized within the answers to a prompt, (B,)."""
    groups = scores.view(-1, samples)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()


# -- the side --------------------------------------------------------------------------------------


@dataclass
class PaddedExperience:
    """B sequences. Everything but ``batch`` is per action, (B, A) fp32."""

    batch: Padded
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


class DeepSpeedChatRLHF:
    """Generation, scoring and training of one rollout."""

    def __init__(self, case: Case, folder: Path, stage: int, **flags: Any) -> None:
        self.case = case
        self.args = args = rlhf_config(case, folder, stage, **flags)
        self.zero = zero_settings(args, "actor")
        actor = self._load(AutoModelForCausalLM, "actor", folder)
        # NOTE: eos_token_id=None in a call of `generate` would mean the model's EOS.
        actor.generation_config.eos_token_id = None
        self.actor = self._trained(actor, "actor")
        frozen = self.zero.frozen(args, "reference")
        self.ref = initialize_frozen(self._load(AutoModelForCausalLM, "actor", folder), frozen)
        self.critic = self.reward = None
        if case.task == "ppo":
            self.critic = self._trained(self._load_scorer(folder), "critic")
            self.reward = initialize_frozen(self._load_scorer(folder), frozen)
        self.iteration = 0

    def _load(self, auto: Any, name: str, folder: Path) -> Any:
        with sharded_loading(self.zero):
            return auto.from_pretrained(folder / name, dtype=self.zero.dtype)

    def _load_scorer(self, folder: Path) -> nn.Module:
        return ScoreEveryColumn(self._load(AutoModelForSequenceClassification, "reward", folder))

    def _trained(self, model: nn.Module, name: str) -> Any:
        args: RLHFConfig = self.args
        if getattr(args, f"{name}_gradient_checkpointing"):
            getattr(model, "classifier", model).gradient_checkpointing_enable()
        return initialize_training(
            model,
            self.zero,
            getattr(args, f"{name}_learning_rate"),
            getattr(args, f"{name}_weight_decay"),
            args.adam_betas,
            args.lr_scheduler_type,
            args.num_warmup_steps,
            SCHEDULE_STEPS,
        )

    def run(self, number: int) -> dict[str, Any]:
        prompts, answers = rollout_rows(self.case, number, dist.rank())
        marks = [clock(dist.device())]
        self._generate(prompts, [len(a) for a in answers])
        marks.append(clock(dist.device()))
        experience = self._score(prompts, answers)
        marks.append(clock(dist.device()))
        losses = self._train(experience)
        marks.append(clock(dist.device()))
        parts = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        seconds = dict(zip(("generate_s", "score_s", "train_s"), parts, strict=True))
        return seconds | {"iteration_s": marks[-1] - marks[0], "losses": losses}

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Sample answers of ``lengths`` (one per answer); the batch runs until the longest ends."""
        width, module = self.args.max_prompt_seq_len, unwrap(self.actor).eval()
        batch = Padded.of(prompts, width, left=True)
        stop = LengthPerRow(width, torch.tensor(lengths, device=dist.device()))
        torch.manual_seed(self.iteration)
        module.generate(
            batch.ids,
            attention_mask=batch.mask.long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.args.max_answer_seq_len,
            num_return_sequences=self.case.samples,
            pad_token_id=PAD,
            stopping_criteria=StoppingCriteriaList([stop]),
        )

    @torch.no_grad()
    def _score(self, prompts: list[list[int]], answers: list[list[int]]) -> PaddedExperience:
        args, samples = self.args, self.case.samples
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        left = Padded.of(repeated, args.max_prompt_seq_len, left=True)
        right = Padded.of(answers, args.max_answer_seq_len)
        batch = Padded(torch.cat([left.ids, right.ids], 1), torch.cat([left.mask, right.mask], 1))
        for model in filter(None, (self.actor, self.critic)):
            model.eval()
        mask = right.mask.float()
        old = self._in_pieces(lambda part: self._of_actions(next_logprobs(self.actor, part)), batch)
        ref = self._in_pieces(lambda part: self._of_actions(next_logprobs(self.ref, part)), batch)
        if self.critic is None:
            scores = torch.tensor(parity_scores(answers), device=mask.device)
            advantages = group_advantages(scores, samples).unsqueeze(1) * mask
            return PaddedExperience(batch, old, ref, advantages)
        values = self._in_pieces(
            lambda part: self._of_actions(self.critic(**part.inputs())[:, :-1]), batch
        )
        values = values * mask
        columns = self._in_pieces(lambda part: self.reward(**part.inputs()), batch)
        last = (args.max_prompt_seq_len - 1 + right.mask.sum(1)).unsqueeze(1)
        scores = columns.gather(1, last).clamp(-5.0, 5.0)  # its clip_reward_value
        rewards = -args.kl_coef * (old - ref) * mask
        rewards.scatter_add_(1, last - args.max_prompt_seq_len, scores)
        advantages, returns = generalized_advantages(rewards, values, args.gamma, args.lam)
        return PaddedExperience(batch, old, ref, advantages, values, returns)

    def _of_actions(self, columns: Tensor) -> Tensor:
        """(B, T - 1), by the column that predicts, -> (B, A)."""
        return columns[:, self.args.max_prompt_seq_len - 1 :]

    def _in_pieces(self, compute: Any, batch: Padded) -> Tensor:
        size = self.args.per_device_training_batch_size
        starts = range(0, len(batch.ids), size)
        return torch.cat([compute(batch[slice(i, i + size)]) for i in starts])

    def _train(self, e: PaddedExperience) -> dict[str, float]:
        """One optimizer step of actor and critic per mini-batch; mean losses over all actions."""
        args = self.args
        for model in filter(None, (self.actor, self.critic)):
            model.train()
        sums: dict[str, float] = {}
        all_actions = float(e.batch.mask[:, args.max_prompt_seq_len :].sum())
        samples, num_steps = args.num_samples_per_prompt, args.num_mini_batches
        together = 1 if len(e.batch.ids) // samples % num_steps else samples
        for epoch in range(args.ppo_epochs):
            # The mini-batches that dschat draws, so that losses can be compared.
            seed = [args.seed, self.iteration, epoch]
            numbers = torch.arange(len(e.batch.ids)) + dist.rank() * len(e.batch.ids)
            number = mini_batch_of(numbers, num_steps, seed, together)
            for m in range(num_steps):
                rows = torch.tensor((number == m).nonzero()[0], device=e.batch.ids.device)
                losses = self._step(e, rows)
                share = float(e.batch.mask[rows][:, args.max_prompt_seq_len :].sum()) / all_actions
                for name, loss in losses.items():
                    sums[name] = sums.get(name, 0.0) + loss * share / args.ppo_epochs
        self.iteration += 1
        return sums

    def _step(self, e: PaddedExperience, rows: Tensor) -> dict[str, float]:
        args, batch = self.args, e.batch[rows]
        mask = batch.mask[:, args.max_prompt_seq_len :].float()
        logprobs = self._of_actions(next_logprobs(self.actor, batch))
        (low, _), losses = args.cliprange_sides, {}
        loss = clipped_policy_loss(logprobs, e.logprobs[rows], e.advantages[rows], mask, low)
        losses["policy"] = float(loss.detach())
        if args.kl_is_in_loss:
            to_ref = (e.ref_logprobs[rows] - logprobs) * mask
            kl = masked_mean(to_ref.exp() - 1 - to_ref, mask)
            losses["kl"] = float(kl.detach())
            loss = loss + args.kl_coef * kl
        self.actor.backward(loss)
        self.actor.step()
        if self.critic is not None:
            values = self._of_actions(self.critic(**batch.inputs())[:, :-1])
            loss = clipped_value_loss(
                values, e.values[rows], e.returns[rows], mask, args.cliprange_value
            )
            self.critic.backward(loss)
            self.critic.step()
            losses["value"] = float(loss.detach())
        return losses
