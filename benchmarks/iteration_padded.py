"""The padded sides of `iteration.py`: the same work as DeepSpeed-Chat does it.

Plain Hugging Face models under DeepSpeed engines of the same ZeRO stage and optimizer; every model
computes all columns, and the language-model head all logits. Step 3: prompts are padded on the left
to the maximum prompt length, answers on the right to the maximum answer length; KL and clipped
score in the reward, GAE, clipped losses of actor and critic; GRPO, which DeepSpeed-Chat does not
have, in the same way. Steps 1 and 2: rows are padded on the right, to the maximum sequence length
or to the longest row of the micro-batch. The losses are written here a second time: a test holds
them against dschat's. P columns of prompt, A of answer, T = P + A.
"""

from collections.abc import Callable, Sequence
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
    supervised_config,
    supervised_rows,
)
from report import clock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import dschat.distributed as dist
from dschat.rlhf.experience import mini_batch_of
from dschat.runtime.deepspeed_engine import (
    ZeroSettings,
    initialize_frozen,
    initialize_training,
    sharded_loading,
    unwrap,
    zero_settings,
)
from dschat.supervised.setup import build_engine

IGNORED = -100  # labels that transformers' loss leaves out


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


def load(folder: Path | str, zero: ZeroSettings, scores: bool = False) -> nn.Module:
    """The language model in ``folder``, or the sequence classifier, which scores every column."""
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with sharded_loading(zero):
        model = auto.from_pretrained(folder, dtype=zero.dtype)
    return ScoreEveryColumn(model) if scores else model


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


# -- step 3 ----------------------------------------------------------------------------------------


@dataclass
class PaddedExperience:
    """B sequences. Everything but ``batch`` is per action, (B, A) fp32."""

    batch: Padded
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


class PaddedRLHF:
    """Generation, scoring and training of one rollout."""

    def __init__(self, case: Case, folder: Path, stage: int, **flags: Any) -> None:
        self.case = case
        self.args = args = rlhf_config(case, folder, stage, **flags)
        zero = zero_settings(args, "actor")
        frozen = zero.frozen(args, "reference")

        def trained(model: nn.Module, name: str) -> Any:
            return initialize_training(
                model,
                zero,
                args.rate_of(name),
                getattr(args, f"{name}_weight_decay"),
                args.adam_betas,
                args.schedule,
                args.num_warmup_steps,
                SCHEDULE_STEPS,
            )

        actor = load(folder / "actor", zero)
        # NOTE: eos_token_id=None in a call of `generate` would mean the model's EOS.
        actor.generation_config.eos_token_id = None
        self.actor = trained(actor, "actor")
        self.ref = initialize_frozen(load(folder / "actor", zero), frozen)
        self.critic = self.reward = None
        if case.task == "ppo":
            self.critic = trained(load(folder / "reward", zero, scores=True), "critic")
            self.reward = initialize_frozen(load(folder / "reward", zero, scores=True), frozen)
        self.iteration = 0

    def run(self, number: int) -> dict[str, Any]:
        prompts, answers = rollout_rows(self.case, number, dist.rank())
        marks = [clock(dist.device())]
        self._generate(prompts, max(map(len, answers)))
        marks.append(clock(dist.device()))
        experience = self._score(prompts, answers)
        marks.append(clock(dist.device()))
        losses = self._train(experience)
        marks.append(clock(dist.device()))
        parts = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        seconds = dict(zip(("generate_s", "score_s", "train_s"), parts, strict=True))
        return seconds | {"iteration_s": marks[-1] - marks[0], "losses": losses}

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], longest: int) -> None:
        """Sample answers: all run until the longest ends."""
        module = unwrap(self.actor).eval()
        batch = Padded.of(prompts, self.args.max_prompt_seq_len, left=True)
        torch.manual_seed(self.iteration)
        module.generate(
            batch.ids,
            attention_mask=batch.mask.long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            num_return_sequences=self.case.samples,
            pad_token_id=PAD,
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
        old = self._of_actions(batch, lambda part: next_logprobs(self.actor, part))
        ref = self._of_actions(batch, lambda part: next_logprobs(self.ref, part))
        if self.critic is None:
            scores = torch.tensor(parity_scores(answers), device=mask.device)
            advantages = group_advantages(scores, samples).unsqueeze(1) * mask
            return PaddedExperience(batch, old, ref, advantages)
        values = self._of_actions(batch, lambda part: self.critic(**part.inputs())[:, :-1]) * mask
        columns = self._in_pieces(batch, lambda part: self.reward(**part.inputs()))
        last = (args.max_prompt_seq_len - 1 + right.mask.sum(1)).unsqueeze(1)
        scores = columns.gather(1, last).clamp(-5.0, 5.0)  # its clip_reward_value
        rewards = -args.kl_weight * (old - ref) * mask
        rewards.scatter_add_(1, last - args.max_prompt_seq_len, scores)
        advantages, returns = generalized_advantages(rewards, values, args.gamma, args.lam)
        return PaddedExperience(batch, old, ref, advantages, values, returns)

    def _of_actions(self, batch: Padded, compute: Callable[[Padded], Tensor]) -> Tensor:
        """(B, A) of what ``compute`` gives by the column that predicts, (B, T - 1)."""
        return self._in_pieces(batch, compute)[:, self.args.max_prompt_seq_len - 1 :]

    def _in_pieces(self, batch: Padded, compute: Callable[[Padded], Tensor]) -> Tensor:
        size = self.args.per_device_training_batch_size
        return torch.cat([compute(batch[i : i + size]) for i in range(0, len(batch.ids), size)])

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
        logprobs = self._of_actions(batch, lambda part: next_logprobs(self.actor, part))
        (low, _), losses = args.cliprange_sides, {}
        loss = clipped_policy_loss(logprobs, e.logprobs[rows], e.advantages[rows], mask, low)
        losses["policy"] = float(loss.detach())
        if args.kl_is_in_loss:
            to_ref = (e.ref_logprobs[rows] - logprobs) * mask
            kl = masked_mean(to_ref.exp() - 1 - to_ref, mask)
            losses["kl"] = float(kl.detach())
            loss = loss + args.kl_weight * kl
        self.actor.backward(loss)
        self.actor.step()
        if self.critic is not None:
            values = self._of_actions(batch, lambda part: self.critic(**part.inputs())[:, :-1])
            loss = clipped_value_loss(
                values, e.values[rows], e.returns[rows], mask, args.cliprange_value
            )
            self.critic.backward(loss)
            self.critic.step()
            losses["value"] = float(loss.detach())
        return losses


# -- steps 1 and 2 ---------------------------------------------------------------------------------


class PaddedSupervised:
    """One optimizer step of SFT, reward modelling or DPO a round."""

    def __init__(
        self, case: Case, folder: Path, stage: int, to_longest: bool = False, **flags: Any
    ) -> None:
        self.case, self.to_longest = case, to_longest
        self.config = supervised_config(case, folder, stage, **flags)
        zero, path = zero_settings(self.config), self.config.model_name_or_path
        model = load(path, zero, scores=case.task == "rm")
        self.engine = build_engine(
            model, self.config, zero, SCHEDULE_STEPS, lambda module, *_: module
        )
        self.ref = None
        if case.task == "dpo":
            self.ref = initialize_frozen(load(path, zero), zero.frozen(self.config, "reference"))
        self.loss = {"sft": self._sft_loss, "rm": self._rm_loss, "dpo": self._dpo_loss}[case.task]

    def run(self, number: int) -> dict[str, Any]:
        rows = supervised_rows(self.case, number, dist.rank())
        assert len(rows) == self.config.per_device_train_batch_size
        self.engine.train()
        started = clock(dist.device())
        loss = self.loss(rows)
        self.engine.backward(loss)
        self.engine.step()
        seconds = clock(dist.device()) - started
        losses = {self.case.task: float(loss.detach())}
        return {"train_s": seconds, "iteration_s": seconds, "losses": losses}

    def _padded(self, rows: Sequence[Sequence[int]]) -> Padded:
        longest = max(map(len, rows))
        return Padded.of(rows, longest if self.to_longest else self.case.max_len)

    def _sft_loss(self, rows: list[dict[str, Any]]) -> Tensor:
        batch = self._padded([row["input_ids"] for row in rows])
        targets = Padded.of([row["loss_mask"] for row in rows], batch.ids.shape[1]).ids.bool()
        labels = torch.where(targets & batch.mask, batch.ids, IGNORED)
        return self.engine(**batch.inputs(), labels=labels).loss

    def _rm_loss(self, rows: list[dict[str, Any]]) -> Tensor:
        batch = self._pairs(rows)
        last = batch.mask.sum(1, keepdim=True) - 1
        chosen, rejected = self.engine(**batch.inputs()).gather(1, last).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def _dpo_loss(self, rows: list[dict[str, Any]]) -> Tensor:
        batch = self._pairs(rows)
        prompts = torch.tensor([row["prompt_length"] for row in rows] * 2, device=dist.device())
        columns = torch.arange(1, batch.ids.shape[1], device=dist.device())
        answers = batch.mask[:, 1:] & (columns >= prompts.unsqueeze(1))
        with torch.no_grad():
            reference = (next_logprobs(self.ref, batch) * answers).sum(1)
        policy = (next_logprobs(self.engine, batch) * answers).sum(1)
        chosen, rejected = (policy - reference).chunk(2)
        return -F.logsigmoid(self.config.used_beta * (chosen - rejected)).mean()

    def _pairs(self, rows: list[dict[str, Any]]) -> Padded:
        """Chosen sequences, then rejected ones."""
        return self._padded([row[name] for name in ("chosen_ids", "rejected_ids") for row in rows])
