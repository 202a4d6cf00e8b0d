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
from dschat.hybrid import optimizer_offload
from dschat.hybrid.weight_stream import weight_stream


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
    states = [state[key] for state, key, _ in optimizer_offload._moments(actor.engine)]
    masters = optimizer_offload._masters(actor.engine)
    assert (len(masters) == 0) == (actor.engine.zero_optimization_stage() == 0)
    tensors = masters + states
    return [tensor.data_ptr() in addresses for tensor in tensors]


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


def test_buffers_are_pinned_once(everything_moves):
    actor = Actor(build("llama"), 2)
    actor.step()
    seen = []
    for _ in range(2):
        with optimizer_offload.training_states_away([actor.engine], enabled=True):
            buffers = optimizer_offload._buffers[optimizer_offload._adam(actor.engine)]
            seen.append({name: buffer.data_ptr() for name, buffer in buffers.items()})
        actor.step()
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 3  # masters and two moments


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
    case = Case("ppo", 2, options=(("offload_training_states", True),))
    trainer = build_trainer(ppo_config(case, models_folder))
    for iteration in range(2):
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        assert trainer.metrics["rollout/logprob_gap"] < 1e-5
        trainer.train_rlhf(experience)
    assert everything_moves == [trainer.engine.actor, trainer.engine.critic] * 2
