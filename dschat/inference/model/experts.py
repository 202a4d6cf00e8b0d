"""Runs a mixture of experts in place of an MLP: each token's rows go through the experts it chose.

On a CPU each expert that has rows multiplies them together, by packed products. A captured step
must not read on the host which experts have rows: on a device their weights are one tensor, and one
product takes all experts' rows.

Shapes: T tokens, k experts per token, N experts, E hidden size, I this rank's columns of an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat.inference.model.attention import KeepExperts
from dschat.inference.model.borrowed import BorrowedLinear
from dschat.inference.model.linear import Linear, grouped
from dschat.inference.model.spec import ExpertSpec

# Tokens that run through all experts at once, where torch has no grouped product.
_DENSE_TOKENS = 256
# More rows are prompts' on any device: they may read on the host, and are then not captured.
_MOST_CAPTURED = 1024

Gated = Callable[[Tensor], Tensor]  # (..., 2 I) -> (..., I)


class Stack(NamedTuple):
    """The weights of all experts: y = x W^T + b, and LoRA's side products."""

    weight: Tensor  # (N, out, in)
    bias: Tensor | None  # (N, out)
    side: tuple[Tensor, Tensor] | None  # A (N, r, in) and B (N, out, r)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], name: str) -> "Stack":
        a, b = tensors.get(f"{name}.lora_a"), tensors.get(f"{name}.lora_b")
        side = None if a is None or b is None else (a, b)
        return cls(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), side)

    def grouped(self, x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by their experts ``ids``; the rows of expert e end at ``ends[e]``."""
        y = torch._grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        if self.side is not None:
            for factor in self.side:
                x = torch._grouped_mm(x, factor.transpose(1, 2), offs=ends)
            y.add_(x)
        return y if self.bias is None else y.add_(self.bias[ids])

    def dense(self, x: Tensor) -> Tensor:
        """(T, in) or (N, T, in) -> (N, T, out)."""
        y = torch.matmul(x, self.weight.transpose(1, 2))
        for factor in self.side or ():
            x = torch.matmul(x, factor.transpose(1, 2))
        y = y if self.side is None else y.add_(x)
        return y if self.bias is None else y.add_(self.bias.unsqueeze(1))


def has_grouped_product(x: Tensor) -> bool:
    """Whether torch multiplies rows like ``x`` by the experts that they chose, without reading on
    the host how many each has: in bfloat16, on a GPU by the kernels for Hopper and Blackwell.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cuda":
        return x.dtype == torch.bfloat16
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def all_experts(
    stacks: tuple[Stack, Stack], x: Tensor, chosen: Tensor, shares: Tensor, gated: Gated
) -> Tensor:
    """All experts on all rows; those that a row did not choose have a share of zero in it."""
    up, down = stacks
    of_all = x.new_zeros(x.shape[0], len(up.weight)).scatter_add_(1, chosen, shares)
    blocks = zip(x.split(_DENSE_TOKENS), of_all.split(_DENSE_TOKENS), strict=True)
    return torch.cat(
        [
            torch.einsum("tn,nth->th", part, down.dense(gated(up.dense(rows))))
            for rows, part in blocks
        ]
    )


def by_expert(
    ups: Sequence[Any], downs: Sequence[Any], gated: Gated, x: Tensor, ids: Tensor
) -> Tensor:
    """Rows ``x`` through the linear layers of the experts ``ids`` (rows,), which are sorted."""
    counts = ids.bincount(minlength=len(ups)).tolist()
    return grouped(downs, gated(grouped(ups, x, counts)), counts)


def chosen_experts(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """Each row through the experts that it chose. ``run``: rows (T k, E) through the experts of
    their numbers, which are sorted.
    """
    ids, order = chosen.flatten().sort(stable=True)
    outputs = run(x.index_select(0, order // chosen.shape[1]), ids)
    # Row i belongs to the order[i]-th choice.
    choices = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return torch.bmm(shares.unsqueeze(1), choices.view(*chosen.shape, -1)).squeeze(1)


def choose(
    spec: ExpertSpec, logits: Tensor, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The router's logits (T, N) -> experts and their shares, (T, k) each.

    In groups (DeepSeek-V2, arXiv 2405.04434) a token reads the groups with the
    highest sums of their two best scores;
    ``correction`` (N,) balances experts without a loss (DeepSeek-V3, arXiv 2412.19437).
    """
    logits = logits.float()
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if spec.groups is not None:
        count, read = spec.groups
        of_groups = ranked.unflatten(-1, (count, -1))
        best = of_groups.topk(2, -1).values.sum(-1).topk(read, -1).indices
        kept = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranked = of_groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    shares, chosen = ranked.topk(spec.per_token)
    if ranked is not scores:
        shares = scores.gather(1, chosen)
    if spec.renormalized:
        shares = shares / (shares.sum(-1, keepdim=True) + spec.least)
    return chosen, shares if spec.scale == 1.0 else shares * spec.scale


class Experts(NamedTuple):
    """The experts of a layer, and the router that chooses ``spec.per_token`` of them."""

    spec: ExpertSpec
    router: Linear | BorrowedLinear
    correction: Tensor | None
    ups: Sequence[Linear | BorrowedLinear]
    downs: Sequence[Linear | BorrowedLinear]
    stacks: tuple[Stack, Stack] | None  # on a device: of ups and downs
    layer: str

    @classmethod
    def of(
        cls,
        spec: ExpertSpec,
        linears: Mapping[str, Linear | BorrowedLinear],
        tensors: Mapping[str, Tensor],
        layer: str,
    ) -> "Experts":
        up, down = f"{layer}.experts.up", f"{layer}.experts.down"
        ups, downs = ([linears[f"{name}.{e}"] for e in range(spec.count)] for name in (up, down))
        stacks = None
        if f"{up}.weight" in tensors:
            stacks = Stack.of(tensors, up), Stack.of(tensors, down)
        router, correction = linears[f"{layer}.router"], tensors.get(f"{layer}.correction.weight")
        return cls(spec, router, correction, ups, downs, stacks, layer)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of (T, E) and their shares, (T, k) each."""
        logits = self.router(x.float() if self.spec.precise else x)
        return choose(self.spec, logits, self.correction)

    def __call__(self, x: Tensor, gated: Gated, keep: KeepExperts | None = None) -> Tensor:
        """(T, E) -> this rank's partial sum, (T, E). ``gated``: what is between the products.

        ``keep``: gets the experts that were chosen.
        """
        chosen, shares = self.choose(x)
        if keep is not None:
            keep(self.layer, chosen, self.spec.count)
        shares = shares.to(x.dtype)
        may_wait = x.dtype == torch.bfloat16 and len(x) > _MOST_CAPTURED
        if self.stacks is None or may_wait or has_grouped_product(x):
            return chosen_experts(
                lambda rows, ids: self._one_by_one(rows, ids, gated), x, chosen, shares
            )
        return all_experts(self.stacks, x, chosen, shares, gated)

    def _one_by_one(self, x: Tensor, ids: Tensor, gated: Gated) -> Tensor:
        """Each row by its expert; ``ids`` (rows,) are sorted."""
        if self.stacks is not None:
            up, down = self.stacks
            numbers = torch.arange(self.spec.count, device=x.device)
            ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
            return down.grouped(gated(up.grouped(x, ids, ends)), ids, ends)
        return by_expert(self.ups, self.downs, gated, x, ids)
