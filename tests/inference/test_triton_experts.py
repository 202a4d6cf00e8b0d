"""Triton's mixture of experts, interpreted, against NumPy in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from triton_tensors import assert_written, drawn, exact, poisoned


@dataclass(frozen=True)
class Case:
    rows: int = 5
    experts: int = 4
    per_token: int = 2
    size: int = 48
    inner: int = 40
    gated: str = "halves"
    activation: str = "silu"
    clamped: tuple[float, float] = (0.0, 0.0)
    biases: bool = False
    transposed: bool = False
    same: bool = False  # all rows choose the same experts
    dtype: torch.dtype = torch.float32


def inputs(case):
    """Arguments of `plan`."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.rand(1 if case.same else case.rows, case.experts, generator=generator)
    chosen = logits.topk(case.per_token).indices.expand(case.rows, -1).contiguous()
    shares = torch.rand(case.rows, case.per_token, generator=generator)

    def weights(outputs, inputs, seed):
        shape = (case.experts, *((inputs, outputs) if case.transposed else (outputs, inputs)))
        weight = drawn(*shape, seed=seed, dtype=case.dtype)
        bias = drawn(case.experts, outputs, seed=seed + 1, dtype=case.dtype)
        weight = weight.transpose(1, 2) if case.transposed else weight
        return weight, bias if case.biases else None

    choices = case.rows * case.per_token
    return (
        *(drawn(case.rows, case.size, dtype=case.dtype), chosen, shares),
        *weights(2 * case.inner, case.size, 4),
        *weights(case.size, case.inner, 6),
        *(case.gated, case.activation, *case.clamped),
        *(poisoned(choices, case.inner, dtype=case.dtype),),
        *(poisoned(choices, case.size, dtype=case.dtype),),
        *(poisoned(case.rows, case.size, dtype=case.dtype),),
    )


def expected(case, args):
    x, chosen, shares, up, up_bias, down, down_bias, *_ = args
    rows = []
    for r in range(case.rows):
        total = np.zeros(case.size)
        for e, share in zip(chosen[r].tolist(), shares[r].tolist(), strict=True):
            inner = exact(up[e]) @ exact(x[r]) + (exact(up_bias[e]) if case.biases else 0)
            pairs = case.gated == "pairs"
            gate, up_part = inner.reshape(-1, 2).T if pairs else inner.reshape(2, -1)
            factor, limit = case.clamped
            if factor:
                gate, up_part = gate.clip(None, limit), up_part.clip(-limit, limit) + 1
            inner = gate / (1 + np.exp(-gate * (factor or 1))) * up_part
            y = exact(down[e]) @ inner + (exact(down_bias[e]) if case.biases else 0)
            total += share * y
        rows.append(total)
    return np.array(rows)


def check(interpreted, case):
    args = inputs(case)
    wanted = expected(case, args)
    *_, inner, outputs, out = interpreted("run", "experts", args)
    for tensor in (inner, outputs):
        assert_written(tensor, exact(tensor))  # nothing around them
    assert_written(out, wanted)


QUICK = {
    "halves": Case(),
    "one-row": Case(rows=1, biases=True),
    "pairs-transposed": Case(
        gated="pairs", transposed=True, biases=True, clamped=(1.702, 0.9), size=64
    ),
    "one-expert-of-40-rows": Case(rows=40, same=True, per_token=1),
    "brain-float": Case(dtype=torch.bfloat16, size=128, inner=70),
}


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_experts(interpreted, case):
    check(interpreted, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 70, "experts": 3, "per_token": 3},
        {"rows": 33, "experts": 60, "per_token": 4, "inner": 100},
        {"rows": 9, "size": 130, "inner": 1},
    ],
    ids=["all", "many", "odd"],
)
def test_experts_everywhere(interpreted, case, dtype, sizes):
    check(interpreted, replace(case, dtype=dtype, same=False, **sizes))


@pytest.mark.parametrize("renormalized", [True, False])
@pytest.mark.parametrize(("count", "per_token"), [(4, 2), (60, 4), (3, 3), (128, 8)])
def test_the_largest_shares(interpreted, count, per_token, renormalized):
    logits = drawn(6, count, dtype=torch.float16)
    chosen = poisoned(6, per_token, dtype=torch.int64)
    shares = poisoned(6, per_token)
    args = logits, chosen, shares, renormalized
    _, chosen, shares, _ = interpreted("run", "experts.plan_choice", args)
    wanted, places = logits.double().softmax(-1).topk(per_token)
    wanted = wanted / wanted.sum(-1, keepdim=True) if renormalized else wanted
    assert_written(shares, exact(wanted))
    assert torch.equal(logits.gather(1, chosen), logits.gather(1, places))
    assert (chosen.sort(-1).values.diff() > 0).all()


def test_equal_shares_go_to_the_first(interpreted):
    args = torch.zeros(2, 7), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), False
    _, chosen, shares, _ = interpreted("run", "experts.plan_choice", args)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(shares, torch.full((2, 3), 1 / 7))


def test_rows_that_are_not_a_number_stay_so_and_choose_experts_that_there_are(interpreted):
    logits = torch.full((2, 7), float("nan"))
    args = logits, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), True
    _, chosen, shares, _ = interpreted("run", "experts.plan_choice", args)
    assert ((chosen >= 0) & (chosen < 7)).all()
    assert shares.isnan().all()
