"""Which library multiplies: by a clock that the tests advance, never by real time."""

import pytest
import torch

from dschat.config import UserError
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


def forbidden(shape):
    raise AssertionError("timed")


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "auto")
    new_process(monkeypatch)


def new_process(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "_chosen", {})


def chosen(use="decoding", shapes=(SHAPE,), names=("plain", "mkl", "onednn"), dtype=torch.float32):
    return choose(use, shapes, dtype, dict.fromkeys(names, forbidden))


@pytest.fixture
def plant(monkeypatch):
    """``plant(*winners)``: the results of the next timings, or what gives one; more fail."""

    def plant(*winners):
        left = iter(winners)

        def time(shape, makers):
            winner = next(left)
            return winner() if callable(winner) else winner

        monkeypatch.setattr(cpu_matmul, "_time", time)

    return plant


@pytest.mark.parametrize("name", ["plain", "mkl", "onednn"])
def test_the_variable_overrides_without_timing(name, monkeypatch):
    monkeypatch.setenv(VARIABLE, name)
    assert chosen() == {SHAPE: name}


def test_an_override_that_is_no_candidate_is_the_default(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mkl")
    assert chosen(names=("plain", "onednn")) == {SHAPE: "plain"}


def test_an_unknown_override_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednnn")
    with pytest.raises(UserError, match="DSCHAT_CPU_MATMUL=onednnn .*auto, mkl, onednn, panels"):
        chosen()


def test_a_single_candidate_is_not_timed():
    assert chosen(names=("plain",)) == {SHAPE: "plain"}


def test_each_shape_is_timed_once_per_machine(monkeypatch, plant):
    """A later process gets the same choice, whatever it would measure."""
    plant("onednn", "mkl")
    shapes = [SHAPE, (64, 32), SHAPE]
    first = chosen(shapes=shapes)
    assert first == {SHAPE: "onednn", (64, 32): "mkl"}
    assert chosen(shapes=shapes) == first
    new_process(monkeypatch)
    assert chosen(shapes=shapes) == first


def test_what_a_choice_depends_on_is_timed_again(monkeypatch, plant):
    plant(*["onednn"] * 4)
    chosen()
    chosen(use="training")
    chosen(dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    chosen()
    with pytest.raises(StopIteration):
        chosen(shapes=[(1, 1)])


def test_ranks_that_time_at_once_agree(monkeypatch, plant):
    """Another rank writes its choice while this one is timing."""

    def slower():
        assert chosen() == {SHAPE: "mkl"}
        new_process(monkeypatch)
        return "onednn"

    plant(slower, "mkl")
    assert chosen() == {SHAPE: "mkl"}


def test_without_a_writable_cache_the_choice_holds_for_the_process(monkeypatch, plant):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    plant("onednn")
    assert chosen() == chosen() == {SHAPE: "onednn"}


def test_one_line_says_what_was_chosen(plant, caplog):
    caplog.set_level("DEBUG", "dschat")
    plant("onednn", "plain")
    for _ in range(2):
        chosen(shapes=[SHAPE, (64, 32)])
    (line,) = caplog.messages
    assert "decoding: 32 -> 48 onednn, 32 -> 64 plain" in line
