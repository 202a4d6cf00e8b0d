"""Steps 1 and 2 the DeepSpeed-Chat way, sides of `iteration.py`: rows padded on the right.

Plain Hugging Face models and losses; all logits. Rows are padded to the maximum sequence length, as
DeepSpeed-Chat does, or to the longest row of the micro-batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from iteration_cases import (
    SCHEDULE_STEPS,
    Case,
    supervised_config,
    supervised_rows,
)
from iteration_deepspeed_chat import Padded, ScoreEveryColumn, next_logprobs
from report import clock
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import dschat.distributed as dist
from dschat.runtime.deepspeed_engine import initialize_frozen, sharded_loading, zero_settings
from dschat.supervised.setup import build_engine

IGNORED = -100  # labels that transformers' loss leaves out


class PaddedSupervised:
    """One optimizer step of SFT, reward modelling or DPO a round."""

    def __init__(
        self, case: Case, folder: Path, stage: int, to_longest: bool = False, **flags: Any
    ) -> None:
        self.case, self.to_longest = case, to_longest
        self.config = supervised_config(case, folder, stage, **flags)
        self.zero = zero_settings(self.config)
        wrap = ScoreEveryColumn if case.task == "rm" else lambda model: model
        self.engine = build_engine(
            self._load(), self.config, self.zero, SCHEDULE_STEPS, lambda model, *_: wrap(model)
        )
        self.ref = None
        if case.task == "dpo":
            self.ref = initialize_frozen(self._load(), self.zero.frozen(self.config, "reference"))
        self.loss = {"sft": self._sft_loss, "rm": self._rm_loss, "dpo": self._dpo_loss}[case.task]

    def _load(self) -> Any:
        auto = (
            AutoModelForSequenceClassification if self.case.task == "rm" else AutoModelForCausalLM
        )
        with sharded_loading(self.zero):
            return auto.from_pretrained(self.config.model_name_or_path, dtype=self.zero.dtype)

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
