"""Offloading optimizer states while the actor generates does not change training.

On a CPU no tensor changes its device, but masters and Adam's moments are still copied to buffers
and back to new memory, so that lost or stale ones would show. That device memory shrinks can only
be tested on a GPU.
"""

import pytest
import torch
from rollout_cases import Actor, build
from step_cases import Case, build_trainer, my_prompts, ppo_config

import dschat.distributed as dist
from dschat.checkpoint import deepspeed_state
from dschat.hybrid import optimizer_offload
from dschat.hybrid.weight_stream import weight_stream


@pytest.fixture
def on_device(monkeypatch):
    """As if the states lay on a device."""
    monkeypatch.setattr(optimizer_offload, "is_on_gpu", lambda engine: True)


def weights(actor):
    return {name: t.clone() for name, t in weight_stream(actor.module, dist.device())}


def states(engine):
    """ZeRO's masters and Adam's moments."""
    found = optimizer_offload.optimizer_states(engine)
    has_masters = any(state.name.startswith("master") for state in found)
    assert has_masters == (engine.zero_optimization_stage() > 0)
    return [state.tensor for state in found]


def places(*engines):
    return {tensor.data_ptr() for engine in engines for tensor in states(engine)}


@pytest.mark.parametrize("zero", [*(pytest.param(z, marks=pytest.mark.slow) for z in (0, 1, 2)), 3])
def test_steps_afterwards_are_bit_identical(zero, on_device):
    plain, moved = Actor(build("llama"), zero), Actor(build("llama"), zero)
    start, buffers = weights(plain), set()
    for scopes in range(3):
        plain.step()
        for _ in range(scopes):  # none, one, two in a row
            before = places(moved.engine)
            with optimizer_offload.training_states_away([moved.engine], enabled=True):
                buffers = buffers or places(moved.engine)
                assert places(moved.engine) == buffers  # pinned once
                assert len(weights(moved)) == len(start)  # the weights stay, to be read
            assert buffers.isdisjoint(before | places(moved.engine))
        moved.step()
    ours, expected = weights(moved), weights(plain)
    assert all(torch.equal(ours[name], expected[name]) for name in start)
    assert any(not torch.equal(ours[name], start[name]) for name in start)
    assert len(states(plain.engine)) > 1
    assert all(map(torch.equal, states(moved.engine), states(plain.engine)))


def test_memory_is_pinned_once(on_device, monkeypatch):
    """As much as the states take, in units of 512 bytes."""
    actor, pinned, pin = Actor(build("llama"), 2), [], optimizer_offload._pinned
    monkeypatch.setattr(
        optimizer_offload, "_pinned", lambda size, owner: pinned.append(size) or pin(size, owner)
    )
    actor.step()
    sizes = [-(-tensor.nbytes // 512) * 512 for tensor in states(actor.engine)]
    for _ in range(2):
        with optimizer_offload.training_states_away([actor.engine], enabled=True):
            pass
    assert pinned == [sum(sizes)]


def test_steps_and_checkpoints_wait_for_the_states(on_device, monkeypatch, tmp_path):
    """A reward function may fail before the next optimizer step, and the run then saves."""
    actor, events = Actor(build("llama"), 2), []
    for module in (optimizer_offload, deepspeed_state):
        monkeypatch.setattr(module, "wait_for_copies", lambda: events.append("wait"))
    actor.step()
    with optimizer_offload.training_states_away([actor.engine], enabled=True):
        events.clear()
    actor.step()
    assert set(events) == {"wait"}
    events.clear()
    actor.engine.save_checkpoint = lambda *_, **__: events.append("saved")
    deepspeed_state.capture(actor.engine, tmp_path, "x")
    assert events == ["wait", "saved"]


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_steps_on_a_gpu_are_bit_identical_and_memory_is_free_meanwhile(zero):
    plain, moved = Actor(build("llama"), zero), Actor(build("llama"), zero)
    assert next(moved.module.parameters()).is_cuda
    for _ in range(3):
        for actor in (plain, moved):
            actor.step()
        num_bytes = sum(tensor.nbytes for tensor in states(moved.engine))
        before = torch.cuda.memory_allocated()
        with optimizer_offload.training_states_away([moved.engine], enabled=True):
            assert before - torch.cuda.memory_allocated() >= num_bytes > 0
            assert all(tensor.is_pinned() for tensor in states(moved.engine))
    ours, expected = weights(moved), weights(plain)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_what_a_rollout_raises_brings_them_back(on_device):
    plain, moved = Actor(build("llama"), 2), Actor(build("llama"), 2)
    for actor in (plain, moved):
        actor.step()
    buffers = set()

    def rollout():
        with optimizer_offload.training_states_away([moved.engine], enabled=True):
            buffers.update(places(moved.engine))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rollout()
    assert buffers.isdisjoint(places(moved.engine))
    for actor in (plain, moved):
        actor.step()
    expected = weights(plain)
    assert all(torch.equal(t, expected[name]) for name, t in weights(moved).items())


@pytest.mark.parametrize("enabled", [False, True])
def test_nothing_moves_unless_asked_or_if_it_is_on_the_cpu(enabled, request):
    if not enabled:
        request.getfixturevalue("on_device")
    actor = Actor(build("llama"), 2)
    actor.step()
    before = places(actor.engine)
    with optimizer_offload.training_states_away([actor.engine], enabled=enabled):
        assert places(actor.engine) == before


def test_the_flag_reaches_actor_and_critic(on_device, models_folder):
    """Step 3 under ZeRO-2 trains on, and the next rollout has the weights of then."""
    case = Case("ppo", 2, options=(("offload", ("rollout",)),))
    trainer = build_trainer(ppo_config(case, models_folder))
    for iteration in range(2):
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        assert trainer.metrics["rollout/logprob_gap"] < 1e-5
        trainer.train_rlhf(experience)
    both = trainer.engine.actor, trainer.engine.critic
    before = places(*both)
    with trainer.engine.rollout_mode():
        assert before.isdisjoint(places(*both))
