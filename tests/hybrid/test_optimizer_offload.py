"""Offloading optimizer states while the actor generates does not change training.

On a CPU no tensor changes its device, but masters and Adam's moments are still copied to buffers
and back to new memory, so that lost or stale ones would show. That device memory shrinks can only
be tested on a GPU.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
from rollout_cases import Actor, build
from step_cases import Case, build_trainer, my_prompts, ppo_config

import dschat.distributed as dist
from dschat.checkpoint import deepspeed_state
from dschat.hybrid import optimizer_offload
from dschat.hybrid.weight_stream import weight_stream
from dschat.models import training_engine


@pytest.fixture
def everything_moves(monkeypatch):
    """As if the states lay on a device; counts the engines put away."""
    away = []
    put_away = optimizer_offload._offload
    monkeypatch.setattr(optimizer_offload, "_is_on_gpu", lambda engine: True)
    monkeypatch.setattr(optimizer_offload, "_offload", lambda e: (away.append(e), put_away(e)))
    return away


def weights(actor):
    return {name: t.clone() for name, t in weight_stream(actor.module, dist.device())}


def in_buffers(actor):
    """Whether each of ZeRO's masters and Adam's moments lies in the memory of its host buffer."""
    buffers = optimizer_offload._buffers.get(optimizer_offload._adam(actor.engine), {})
    addresses = {buffer.data_ptr() for buffer in buffers.values()}
    states = optimizer_offload._states(actor.engine)
    has_masters = any(state.name.startswith("master") for state in states)
    assert has_masters == (actor.engine.zero_optimization_stage() > 0)
    return [state.tensor.data_ptr() in addresses for state in states]


def moments(actor):
    states = optimizer_offload._adam(actor.engine).state.values()
    return [value.clone() for state in states for value in state.values() if value.dim()]


@pytest.mark.parametrize("zero", [*(pytest.param(z, marks=pytest.mark.slow) for z in (0, 1)), 2, 3])
def test_steps_afterwards_are_bit_identical(zero, everything_moves):
    plain, moved = Actor(build("llama"), zero), Actor(build("llama"), zero)
    start = weights(plain)
    for scopes in range(3):
        plain.step()
        for _ in range(scopes):  # none, one, two in a row
            with optimizer_offload.training_states_away([moved.engine], enabled=True):
                assert all(in_buffers(moved))
                assert len(weights(moved)) == len(start)  # the weights stay, to be read
            assert not any(in_buffers(moved))
        moved.step()
    assert everything_moves == [moved.engine] * 3
    ours, expected = weights(moved), weights(plain)
    assert all(torch.equal(ours[name], expected[name]) for name in start)
    assert any(not torch.equal(ours[name], start[name]) for name in start)
    assert len(moments(plain)) > 0
    assert all(map(torch.equal, moments(moved), moments(plain)))


class FakeRuntime:
    """Stands for CUDA's, where the device is a CPU: what is page-locked, which stream waits."""

    def __init__(self, monkeypatch):
        self.locked, self.events = {}, []
        runtime, stack = self, ["main"]

        class Stream:
            name = "side"

            def wait_stream(self, other):
                runtime.events.append(f"{self.name} waits for {other.name}")

            def synchronize(self):
                runtime.events.append(f"host waits for {self.name}")

            def __enter__(self):
                stack.append(self.name)

            def __exit__(self, *_):
                stack.pop()

        main = Stream()
        main.name = "main"
        fakes = {
            "cudart": lambda: self,
            "check_error": lambda error: None,
            "Stream": Stream,
            "current_stream": lambda: main,
            "stream": lambda stream: stream,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr("dschat.distributed.has_gpu", lambda: True)
        monkeypatch.setattr(training_engine, "_stream", None)
        monkeypatch.setattr(optimizer_offload.dist, "device", lambda: torch.device("cpu"))
        monkeypatch.setattr(optimizer_offload, "_is_on_gpu", lambda engine: True)
        copy = torch.Tensor.copy_

        def copied(target, source, non_blocking=False):
            self.events.append(f"copy on {stack[-1]}")
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copied)

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.locked[address] = num_bytes

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]


def optimizer_alone(sizes):
    """An Adam that has stepped, as an engine without ZeRO."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = torch.optim.Adam(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    return SimpleNamespace(
        optimizer=optimizer,
        zero_optimization_stage=lambda: 0,
        zero_offload_optimizer=lambda: None,
    )


def test_no_more_memory_is_pinned_than_needed_and_none_outlives_the_optimizer(monkeypatch):
    engine, runtime = optimizer_alone([1000, 7]), FakeRuntime(monkeypatch)
    for _ in range(2):
        with optimizer_offload.training_states_away([engine], enabled=True):
            pass
    # Two moments of each: 4,000 and 28 bytes, in units of 512.
    assert list(runtime.locked.values()) == [2 * (4096 + 512)]
    runtime.events.clear()
    del engine
    gc.collect()
    assert not runtime.locked
    assert runtime.events == ["host waits for side"]


def test_states_come_back_on_a_stream_of_their_own(monkeypatch):
    """Steps wait for them, and so does whatever moves them away again."""
    engine, runtime = optimizer_alone([5]), FakeRuntime(monkeypatch)
    with optimizer_offload.training_states_away([engine], enabled=True):
        pass
    away, back = ["copy on main"] * 2, ["side waits for main"] + ["copy on side"] * 2
    assert runtime.events == away + back
    runtime.events.clear()
    engine.optimizer.step()
    assert runtime.events == ["main waits for side"]
    runtime.events.clear()
    with optimizer_offload.training_states_away([engine], enabled=True):
        pass
    assert runtime.events == ["main waits for side", *away, *back]


def test_a_checkpoint_waits_for_the_states(monkeypatch, tmp_path):
    """A reward function may fail before the next optimizer step, and the run then saves."""
    actor, waits = Actor(build("llama"), 2), []
    actor.step()
    monkeypatch.setattr(deepspeed_state, "wait_for_copies", lambda: waits.append(1))
    monkeypatch.setattr(actor.engine, "save_checkpoint", lambda *_, **__: waits.append(2))
    deepspeed_state.capture(actor.engine, tmp_path, "x")
    assert waits == [1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_steps_on_a_gpu_are_bit_identical_and_memory_is_free_meanwhile(zero):
    plain, moved = Actor(build("llama"), zero), Actor(build("llama"), zero)
    assert next(moved.module.parameters()).is_cuda
    for _ in range(3):
        for actor in (plain, moved):
            actor.step()
        states = sum(t.nbytes for t in moments(moved))
        before = torch.cuda.memory_allocated()
        with optimizer_offload.training_states_away([moved.engine], enabled=True):
            assert before - torch.cuda.memory_allocated() >= states > 0
            buffers = optimizer_offload._buffers[optimizer_offload._adam(moved.engine)]
            assert all(buffer.is_pinned() for buffer in buffers.values())
    ours, expected = weights(moved), weights(plain)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_what_a_rollout_raises_brings_them_back(everything_moves):
    plain, moved = Actor(build("llama"), 2), Actor(build("llama"), 2)
    for actor in (plain, moved):
        actor.step()
    with (
        pytest.raises(ZeroDivisionError),
        optimizer_offload.training_states_away([moved.engine], enabled=True),
    ):
        raise ZeroDivisionError
    assert not any(in_buffers(moved))
    for actor in (plain, moved):
        actor.step()
    expected = weights(plain)
    assert all(torch.equal(t, expected[name]) for name, t in weights(moved).items())


def test_nothing_moves_unless_asked(everything_moves):
    actor = Actor(build("llama"), 2)
    with optimizer_offload.training_states_away([actor.engine], enabled=False):
        pass
    assert everything_moves == []


def test_states_on_the_cpu_stay_there():
    assert not optimizer_offload._is_on_gpu(Actor(build("llama"), 0).engine)


def test_the_flag_reaches_actor_and_critic(everything_moves, models_folder):
    """Step 3 under ZeRO-2 trains on, and the next rollout has the weights of then."""
    case = Case("ppo", 2, options=(("offload", ("rollout",)),))
    trainer = build_trainer(ppo_config(case, models_folder))
    for iteration in range(2):
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        assert trainer.metrics["rollout/logprob_gap"] < 1e-5
        trainer.train_rlhf(experience)
    assert everything_moves == [trainer.engine.actor, trainer.engine.critic] * 2
