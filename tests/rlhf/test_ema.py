"""The moving average against float64 NumPy, step by step."""

import numpy as np
import pytest
import torch
from quick import slow
from step_cases import Case, build_trainer, my_prompts, ppo_config
from torch import nn

from dschat.hybrid.weight_stream import ShardedEMA
from dschat.runtime.deepspeed_engine import unwrap


@pytest.mark.parametrize(
    ("zero", "options"),
    [(0, {}), *slow([(3, {}), (3, {"actor_lora_dim": 4})])],
    ids=str,
)
def test_the_average_over_every_optimizer_step(zero, options, models_folder):
    case = Case("ppo", zero, options=tuple(options.items()))
    trainer = build_trainer(ppo_config(case, models_folder))
    module, ema = unwrap(trainer.engine.actor), trainer.engine.ema
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    average, update, steps = raw(module, trained), ema.update, 0

    def counted():
        nonlocal steps
        steps += 1
        for name, value in raw(module, trained).items():
            average[name] = 0.9 * average[name] + 0.1 * value
        update()

    ema.update = counted
    trainer.train_rlhf(trainer.generate_experience(my_prompts(case, 0, trainer.args)))
    assert steps == 4
    shards = ema.shards()
    assert set(shards) == set(trained)
    start_distance = 0.0
    for name, shard in shards.items():
        got = shard.tensor[: shard.numel].double().numpy()
        np.testing.assert_allclose(got, average[name], atol=1e-6)
        start_distance = max(start_distance, np.abs(got - raw(module, trained)[name]).max())
    assert start_distance > 1e-4  # the average is not the actor


def raw(module, names):
    """This single rank's weights by the module's own names, flat float64, sharded or not."""
    found = {}
    for name, p in module.named_parameters():
        if name in names:
            tensor = p.ds_tensor[: p.ds_numel] if hasattr(p, "ds_tensor") else p
            found[name] = tensor.detach().double().reshape(-1).numpy().copy()
    return found


def test_it_stays_in_fp32_when_the_weights_are_bf16():
    """A decay so slow that bf16 would round every update away."""
    module = nn.Linear(4, 4).to(torch.bfloat16)
    ema = ShardedEMA(module, decay=0.999)
    start = module.weight.detach().double().numpy().copy()
    module.weight.data.fill_(2.0)
    for _ in range(20):
        ema.update()
    share = 0.999**20
    got = ema.shards()["weight"]
    assert got.tensor.dtype == torch.float32
    expected = share * start + (1 - share) * 2.0
    np.testing.assert_allclose(got.tensor.view(4, 4).numpy(), expected, atol=1e-5)
