"""Measuring the token budget of micro-batches."""

import pytest
import torch
from quick import slow
from rank_threads import on_ranks, this_rank
from step_cases import Case, build_supervised
from step_rows import sft_rows

import dschat.distributed as dist
from dschat.config import UserError
from dschat.data.micro_batches import MicroBatchSize
from dschat.hybrid.weight_stream import weight_stream
from dschat.runtime import token_budget
from dschat.runtime.deepspeed_engine import unwrap
from dschat.runtime.token_budget import FIRST_TRIAL_TOKENS, _search, _Trial, measure_budget
from dschat.supervised import loop


def search(first, most, room, num_bytes, rows_per_s=lambda rows: rows, fails=()):
    """The rows of every trial, and the chosen number."""
    tried = []

    def trial(rows):
        tried.append(rows)
        return None if rows in fails else _Trial(rows, num_bytes(rows), rows_per_s(rows))

    return tried, _search(trial, first, most, room).num_rows


@pytest.mark.parametrize(
    ("first", "most", "room", "tried", "chosen"),
    [
        (2, 1000, 150, [2, 4, 8, 16], 16),  # 32 rows would take 210 bytes
        (2, 12, 150, [2, 4, 8, 12], 12),  # no more than a step has
        (8, 1000, 25, [8, 4, 2], 2),
        (8, 1000, 5, [8, 4, 2, 1], 1),  # one row in any case
        (1, 1, 150, [1], 1),
    ],
)
def test_rows_double_or_halve_to_what_fits(first, most, room, tried, chosen):
    """10 bytes by themselves, 6.25 a row: nothing larger than what fits is tried."""
    assert search(first, most, room, lambda rows: 10 + 25 * rows // 4) == (tried, chosen)


def test_on_a_cpu_larger_micro_batches_must_be_faster():
    tried, chosen = search(1, 64, 1e9, lambda rows: rows, lambda rows: min(rows, 4))
    assert (tried, chosen) == ([1, 2, 4, 8], 4)


@pytest.mark.parametrize(
    ("first", "most", "rooms", "tried", "chosen"),
    [
        (1, 8, (150, 5), [1], 1),  # one row in any case, though it does not fit on a rank
        (8, 8, (150, 40), [8, 4], 4),
        (1, 8, (150, 40), [1, 2, 4], 4),
    ],
)
def test_ranks_with_other_memory_try_the_same(first, most, rooms, tried, chosen, monkeypatch):
    """They would wait for each other in a trial, or take another collective's numbers for it."""

    def on_rank(member):
        return search(first, most, rooms[member.rank], lambda rows: 10 * rows)

    monkeypatch.setattr(dist, "max_int", lambda value: max(this_rank().gather_objects(value)))
    assert on_ranks(2, on_rank) == [(tried, chosen)] * 2


def test_what_runs_out_of_memory_is_halved():
    tried, chosen = search(1, 64, 1e9, lambda rows: rows, fails=(8,))
    assert (tried, chosen) == ([1, 2, 4, 8, 4], 4)
    tried, chosen = search(8, 64, 1e9, lambda rows: rows, fails=(8, 4))
    assert (tried, chosen) == ([8, 4, 2], 2)


def test_one_row_without_memory_is_an_error():
    with pytest.raises(UserError, match="auto: the longest row does not fit"):
        search(2, 64, 1e9, lambda rows: rows, fails=(2, 1))


@pytest.fixture
def always_faster(monkeypatch):
    """On a CPU, too, micro-batches grow as long as they fit."""
    monkeypatch.setattr(token_budget, "_FASTER", 0.0)


def state(engine):
    weights = {name: t.clone() for name, t in weight_stream(unwrap(engine), torch.device("cpu"))}
    return weights, engine.lr_scheduler.state_dict(), torch.get_rng_state()


def forward_of(engine, task, tried, fails):
    """The forward of SFT, which notes its rows in ``tried``. Above 8 rows it ``fails``."""

    def run_out(*_):
        raise torch.OutOfMemoryError

    def forward(num_rows):
        tried.append(num_rows)
        loss, _ = task.loss(engine, task.collate([task.longest_row(20)] * num_rows))
        if num_rows > 8 and fails == "forward":
            run_out()
        if num_rows > 8 and fails == "backward":
            loss.register_hook(run_out)
        return loss

    return forward


@pytest.mark.parametrize(
    ("zero", "fails"),
    [
        (0, "backward"),
        (3, ""),
        *slow([(0, ""), (0, "forward"), (2, ""), (2, "forward"), (3, "forward")]),
    ],
)
@pytest.mark.usefixtures("always_faster")
def test_measuring_changes_nothing(zero, fails, models_folder, tmp_path):
    """Also where it runs out of memory: the next step is the one that it would have been."""
    engine, task, config, _ = build_supervised(Case("sft", zero), models_folder, tmp_path)
    before = state(engine)
    tried = []
    forward = forward_of(engine, task, tried, fails)
    longest = FIRST_TRIAL_TOKENS // 4  # so they say
    tokens = measure_budget([(engine, forward)], longest, 32)
    assert tried[:3] == [4, 8, 16]
    assert tokens == longest * (8 if fails else 32)
    after = state(engine)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    engine.train()
    metrics, step = loop.train_step(engine, task, sft_rows()[:8], MicroBatchSize(8))
    other, task, *_ = build_supervised(Case("sft", zero), models_folder, tmp_path)
    other.train()
    expected, other_step = loop.train_step(other, task, sft_rows()[:8], MicroBatchSize(8))
    assert metrics == expected
    assert step.grad_norm == other_step.grad_norm
    assert step.outcome == "applied"


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize(
    ("zero", "fails", "ranks"), [(2, "backward", 1), (0, "backward", 2), (3, "forward", 2)]
)
def test_running_out_where_others_wait_is_an_error(
    zero, fails, ranks, models_folder, tmp_path, monkeypatch
):
    engine, task, *_ = build_supervised(Case("sft", zero), models_folder, tmp_path)
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    with pytest.raises(UserError, match="auto ran out of memory in a pass that cannot be"):
        measure_budget([(engine, forward_of(engine, task, [], fails))], 20, 60)
