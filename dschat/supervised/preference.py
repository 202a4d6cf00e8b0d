"""Trains the policy on pairs by DPO, IPO or KTO: a `Task`, and the reference it needs.

The reference is a frozen copy of the policy, the policy without its LoRA adapters, or log-probs
computed before the first step.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.config import RewardConfig
from dschat.config.preference import PreferenceConfig
from dschat.data.batches import RowTable, rows_of
from dschat.data.micro_batches import (
    MicroBatchSize,
    PreferenceBatch,
    collate_preferences,
    row_tokens,
)
from dschat.losses import dpo_loss, ipo_loss, kto_loss
from dschat.models.heads import LanguageModel
from dschat.models.lora import adapters_off
from dschat.models.packing import PackedRows
from dschat.models.routing import add_router_loss
from dschat.models.training_engine import ModelOrEngine, evaluating
from dschat.observability.console import progress
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, unwrap
from dschat.runtime.optimizer_step import DeviceSums, sum_parts

logger = logging.getLogger("dschat")

Rows = list[dict[str, Any]]

_SIDES, _MISMATCHED = ("chosen_ids", "rejected_ids"), "mismatched_ids"


class Pairs:
    """Rows of ``preference_dataset``, with mismatched answers and reference log-probs if needed.

    Args:
        rows: a table with ``chosen_ids``, ``rejected_ids`` and ``prompt_length``.
        max_len: add ``mismatched_ids`` of at most so many tokens to each row: its prompt with an
            answer to the next row's prompt that is another one (``prompt_key``), alternately the
            chosen and the rejected one. So the pairing depends on the data alone, not on batches.
            Where all prompts are alike, the prompt alone. None: add none.

    ``ref_logps``, if set, has the reference's log-probs of every row, one number per block.
    """

    def __init__(self, rows: RowTable, max_len: int | None = None) -> None:
        self._rows, self._max_len = rows, max_len
        self._others = [] if max_len is None else _next_prompts(rows)
        self.ref_logps: list[list[float]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._rows[index])
        if self._max_len is not None:
            other = self._rows[self._others[index]]
            answers = [other[side][other["prompt_length"] :] for side in _SIDES]
            answers = [[]] if self._others[index] == index else list(filter(None, answers))
            mismatched = row[_SIDES[0]][: row["prompt_length"]] + answers[index % len(answers)]
            row[_MISMATCHED] = mismatched[: self._max_len]
        if self.ref_logps is not None:
            row["ref_logps"] = self.ref_logps[index]
        return row


def _next_prompts(rows: RowTable) -> list[int]:
    """The number of the next row of another prompt, for each row; its own where there is none."""
    found = rows_of(rows, ("prompt_key",))
    keys = np.array([row.get("prompt_key", i) for i, row in enumerate(found)])
    ends = np.flatnonzero(keys != np.roll(keys, -1))  # of rows of one prompt that are neighbours
    numbers = np.arange(len(keys))
    if len(ends):
        numbers = (ends[np.searchsorted(ends, numbers) % len(ends)] + 1) % len(keys)
    elif len(keys):
        logger.warning("all %d rows have one prompt: KTO's reference point is 0", len(keys))
    return numbers.tolist()


def as_pairs(config: RewardConfig, *tables: RowTable) -> list[Pairs]:
    """``tables`` as `Pairs` for the loss of ``config``."""
    return [Pairs(t, config.max_seq_len if config.loss == "kto" else None) for t in tables]


def load_reference(
    config: RewardConfig,
    zero: ZeroSettings,
    load: Callable[[ZeroSettings, float], nn.Module],
) -> nn.Module | None:
    """Collective. The frozen copy of the policy, without dropout; None where the loss needs none.

    ``load(zero, dropout)`` loads the policy's weights; see `dschat.supervised.setup.load_policy`.
    """
    if not config.loads_reference:
        return None
    frozen = zero.frozen(config, "reference")
    model = LanguageModel(load(frozen, 0.0), *config.row_form)
    return initialize_frozen(model, frozen)


def answer_logps(model: ModelOrEngine, rows: PackedRows) -> Tensor:
    """Log-probs of whole answers, their tokens' sum with EOS, by one forward: (rows,) fp32."""
    logprobs, _ = model(rows)
    return logprobs.new_zeros(rows.num_rows).index_add(0, rows.row_of, logprobs)


class PreferenceTask:
    """DPO, IPO or KTO on the log-ratios of chosen and rejected answers.

    Losses: `dschat.losses.preference`.

    Args:
        config: the loss and its coefficients.
        reference: the frozen copy; None where the reference is the policy without its adapters, or
            its log-probs are precomputed (`precompute`).
    """

    columns: tuple[str, ...] = (
        *("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    )

    def __init__(self, config: PreferenceConfig, reference: nn.Module | None = None) -> None:
        self._config, self.reference = config, reference
        self._blocks: tuple[str, ...] = _SIDES
        self._uses_kl = config.loss == "kto"
        if self._uses_kl:
            self._blocks += (_MISMATCHED,)

    def collate(self, rows: Rows) -> PreferenceBatch:
        return collate_preferences(rows, self._blocks)

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        sequences = {block: [0] * num_tokens for block in self._blocks}
        return {**sequences, "prompt_length": 1, "ref_logps": [0.0] * len(self._blocks)}

    def weight(self, batch: PreferenceBatch) -> float:
        return float(batch.present.sum()) / 2

    def prepare(
        self, model: ModelOrEngine, batches: list[PreferenceBatch]
    ) -> list[PreferenceBatch]:
        """Collective. The micro-batches of an optimizer step with the reference's log-probs and
        KTO's reference point, which is one number for the whole step.
        """
        # NOTE: all of this precedes the step's first forward with gradients. Two forwards before
        # their backwards break ZeRO-3's gradients.
        if not self._config.precompute_ref_logprobs:
            frozen = self.reference
            reference = model if frozen is None else frozen
            with adapters_off(unwrap(model)) if frozen is None else nullcontext():
                batches = [
                    replace(batch, ref_logps=self._all_logps(reference, batch)) for batch in batches
                ]
        if self._uses_kl:
            kl = self._kl(model, batches)
            batches = [replace(batch, kl=kl) for batch in batches]
        return batches

    def loss(self, model: ModelOrEngine, batch: PreferenceBatch) -> tuple[Tensor, DeviceSums]:
        # NOTE: both answers in one forward, for the same reason.
        chosen, rejected = answer_logps(model, batch.rows).view(2, batch.num_real)
        ref_chosen, ref_rejected = batch.ref_logps[: 2 * batch.num_real].view(2, batch.num_real)
        present = batch.present.view(2, batch.num_real)
        total, metrics = self._loss(chosen - ref_chosen, rejected - ref_rejected, batch.kl, present)
        metrics |= {"logps/chosen": chosen.sum(), "logps/rejected": rejected.sum()}
        metrics |= {"num/chosen": present[0].sum(), "num/rejected": present[1].sum()}
        sums = {name: value.detach() for name, value in metrics.items()}
        if self._uses_kl:
            kl = batch.kl * batch.num_real
            sums["kl"] = total.new_full((), kl, dtype=torch.float64)
        sums["loss"] = total.detach()
        return add_router_loss(model, total, sums, batch.rows, batch.present.sum() / 2)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        of = {side: max(sums[f"num/{side}"], 1.0) for side in ("chosen", "rejected")}
        of["loss"] = of["aux_loss"] = max(sums["num/chosen"] + sums["num/rejected"], 1.0) / 2
        return {
            name: value / of.get(name.rpartition("/")[2], pairs)
            for name, value in sums.items()
            if name != "pairs" and not name.startswith("num/")
        }

    def precompute(self, model: ModelOrEngine, pairs: RowTable, size: MicroBatchSize) -> None:
        """Collective. If asked for, set the reference log-probs of ``pairs`` from ``model``, which
        before its first step is its own reference.
        """
        if not self._config.precompute_ref_logprobs:
            return
        assert isinstance(pairs, Pairs)
        share = dist.my_share(list(range(len(pairs))))
        micro_batches = size.split([row_tokens(pairs[i]) for i in share])
        local: dict[int, list[float]] = {}
        bar = progress(len(micro_batches), "reference log-probs")
        for part in micro_batches:
            logps = self._all_logps(model, self.collate([pairs[share[i]] for i in part]))
            by_row = logps.view(len(self._blocks), len(part)).T.tolist()
            local |= zip(part, by_row, strict=True)
            bar.update()
        bar.close()
        shares = dist.gather_objects([local[i] for i in range(len(share))])
        pairs.ref_logps = [row for part in shares for row in part]

    def _all_logps(self, model: ModelOrEngine, batch: PreferenceBatch) -> Tensor:
        """Log-probs of every block, without gradient."""
        with torch.no_grad(), evaluating(model):
            batch = batch.to(dist.device())
            parts = [batch.rows] + ([batch.mismatched] if batch.mismatched is not None else [])
            return torch.cat([answer_logps(model, rows) for rows in parts])

    def _kl(self, model: ModelOrEngine, batches: list[PreferenceBatch]) -> float:
        """Collective. KTO's z_0 before the loss bounds it to at least 0: the mean log-ratio of the
        step's mismatched answers (Ethayarajh et al. 2024, section 4).
        """
        parts: list[DeviceSums] = []
        for batch in batches:
            batch = batch.to(dist.device())
            assert batch.mismatched is not None
            with torch.no_grad(), evaluating(model):
                logratios = answer_logps(model, batch.mismatched)
                logratios = logratios - batch.ref_logps[2 * batch.num_real :]
            parts.append({"logratios": logratios.double().sum()})
        num_real = float(sum(batch.num_real for batch in batches))
        total, count = dist.sum_floats([sum_parts(parts)["logratios"], num_real])
        return total / max(count, 1.0)

    def _loss(
        self, chosen: Tensor, rejected: Tensor, kl: float, present: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self._config
        if c.loss == "ipo":
            return ipo_loss(chosen, rejected, c.used_beta)
        if c.loss == "kto":
            return kto_loss(chosen, rejected, kl, c.used_beta, *c.kto_weights, present)
        return dpo_loss(chosen, rejected, c.used_beta, c.label_smoothing)
