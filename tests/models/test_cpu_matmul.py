"""Which library multiplies: by a clock that the tests advance, never by real time."""

from functools import partial

import pytest
import torch

from dschat.config import UserError
from dschat.distributed.machine import writable_cache
from dschat.models import cpu_matmul
from dschat.models.cpu_matmul import VARIABLE, choose, fastest

SHAPE = (48, 32)


class Clock:
    """Stands still, except during a product."""

    def __init__(self):
        self.now_s, self.calls = 0.0, []

    def __call__(self):
        return self.now_s

    def product(self, name, seconds, warm_up=0.0, noise=()):
        """A product that takes ``seconds``; its first call ``warm_up`` more, and the call with a
        number in ``noise`` ten times as long.
        """

        def run():
            number = self.calls.count(name)
            self.calls.append(name)
            self.now_s += seconds * (10 if number in noise else 1) + (0 if number else warm_up)

        return run


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"plain": 2.0, "mkl": 1.5, "onednn": 1.0}, "onednn"),
        ({"plain": 2.0, "mkl": 1.0, "onednn": 30.0}, "mkl"),  # a slow library is planted
        ({"plain": 1.0, "mkl": 1.5, "onednn": 2.0}, "plain"),
        ({"plain": 1.0, "mkl": 1.0, "onednn": 1.0}, "plain"),
        ({"plain": 1.0, "mkl": 0.95, "onednn": 0.92}, "plain"),  # within the margin: a tie
        ({"plain": 1.0, "mkl": 0.89, "onednn": 0.88}, "onednn"),
    ],
)
def test_the_fastest_is_chosen_and_a_tie_is_the_default(seconds, expected):
    clock = Clock()
    products = {name: clock.product(name, s) for name, s in seconds.items()}
    assert fastest(products, clock) == expected


def test_candidates_take_turns():
    """So that a change of the machine's speed meets all of them."""
    clock = Clock()
    fastest({name: clock.product(name, 1.0) for name in ("plain", "mkl", "onednn")}, clock)
    assert set(zip(*[iter(clock.calls)] * 3, strict=True)) == {("plain", "mkl", "onednn")}


def test_neither_warm_up_nor_noise_counts():
    clock = Clock()
    products = {
        "plain": clock.product("plain", 1.0),
        "onednn": clock.product("onednn", 0.5, warm_up=1000.0, noise=(2, 3, 5, 6)),
    }
    assert fastest(products, clock) == "onednn"


# -- overriding and recording ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "auto")


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Called, it forgets what this process has chosen, too."""

    def forget():
        monkeypatch.setattr(cpu_matmul, "_chosen", {})

    forget()
    return forget


def chosen(
    winners=(),
    during=lambda: None,
    use="decoding",
    shapes=(SHAPE,),
    names=("plain", "mkl", "onednn"),
    dtype=torch.float32,
    narrow=0,
):
    """Where ``winners``, by shape, are the fastest; other shapes must not be timed. ``during`` is
    called while products are made.
    """
    clock = Clock()

    def make(name, shape):
        assert shape in winners, "timed"
        during()
        return clock.product(name, 0.5 if winners[shape] == name else 1.0)

    return choose(use, shapes, dtype, {name: partial(make, name) for name in names}, clock, narrow)


@pytest.mark.parametrize(
    ("forced", "names", "expected"),
    [
        *((name, ("plain", "mkl", "onednn"), name) for name in ("plain", "mkl", "onednn")),
        ("mkl", ("plain", "onednn"), "plain"),  # which is no candidate
        ("auto", ("plain",), "plain"),  # a single one
    ],
)
def test_what_needs_no_timing(forced, names, expected, monkeypatch):
    monkeypatch.setenv(VARIABLE, forced)
    assert chosen(names=names) == {SHAPE: expected}


def test_an_unknown_override_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednnn")
    with pytest.raises(UserError, match="DSCHAT_CPU_MATMUL=onednnn .*auto, mkl, onednn, panels"):
        chosen()


def test_each_shape_is_timed_once_per_machine(new_process):
    """A later process gets the same choice, whatever it would measure."""
    shapes = [SHAPE, (64, 32), SHAPE]
    first = {SHAPE: "onednn", (64, 32): "mkl"}
    assert chosen(first, shapes=shapes) == first
    assert chosen(shapes=shapes) == first
    new_process()
    assert chosen(shapes=shapes) == first


def test_narrow_weights_have_the_default():
    winners = {(17, 32): "onednn", (32, 17): "onednn"}
    shapes = [*winners, (16, 64), (64, 16)]
    expected = winners | {(16, 64): "plain", (64, 16): "plain"}
    assert chosen(winners, shapes=shapes, narrow=16) == expected


def test_what_a_choice_depends_on_is_timed_again():
    threads, other = torch.get_num_threads(), {SHAPE: "mkl"}
    assert chosen({SHAPE: "onednn"}) == {SHAPE: "onednn"}
    assert chosen(other, use="training") == other
    assert chosen(other, dtype=torch.bfloat16) == other
    torch.set_num_threads(threads + 1)
    try:
        assert chosen(other) == other
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(AssertionError, match="timed"):
        chosen(shapes=[(1, 1)])


def test_ranks_that_time_at_once_agree(new_process):
    """Another rank writes its choice while this one is timing."""

    def another_rank():
        assert chosen({SHAPE: "mkl"}) == {SHAPE: "mkl"}
        new_process()

    assert chosen({SHAPE: "onednn"}, another_rank) == {SHAPE: "mkl"}


def test_without_a_writable_cache_the_choice_holds_for_the_process():
    (writable_cache() / "matmul").symlink_to("/proc")  # which takes no new folder
    assert chosen({SHAPE: "onednn"}) == chosen() == {SHAPE: "onednn"}


def test_one_line_says_what_was_chosen(caplog):
    caplog.set_level("DEBUG", "dschat")
    for _ in range(2):
        chosen({SHAPE: "onednn", (64, 32): "plain"}, shapes=[SHAPE, (64, 32)])
    (line,) = caplog.messages
    assert "decoding: 32 -> 48 onednn, 32 -> 64 plain" in line
