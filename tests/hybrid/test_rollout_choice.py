"""Layout and LoRA form of a rollout: the defaults, and that `--plan` predicts them."""

import pytest
from families import build
from rollout_cases import Actor

from dschat.config import RLHFConfig
from dschat.estimate.rlhf import planned_choice
from dschat.hybrid import rollout_choice


def chosen(layout="auto", lora="auto", adapters="none", sharded=False, readable=True, on_cpu=False):
    choice = rollout_choice(
        layout,
        lora,
        has_adapters=adapters != "none",
        frozen_base=adapters == "frozen base",
        sharded=sharded,
        readable=readable,
        on_cpu=on_cpu,
    )
    return choice.layout, choice.lora


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("zero_copy", "merge")),
        ({"sharded": True}, ("zero_copy", "merge")),  # one process
        ({"sharded": True, "readable": False}, ("copy", "merge")),
        ({"readable": False}, ("copy", "merge")),
        ({"on_cpu": True}, ("copy", "merge")),
        ({"layout": "copy"}, ("copy", "merge")),
        ({"layout": "zero_copy", "on_cpu": True}, ("zero_copy", "merge")),
        ({"adapters": "frozen base"}, ("zero_copy", "side")),
        ({"adapters": "frozen base", "lora": "merge"}, ("copy", "merge")),
        ({"adapters": "frozen base", "layout": "copy"}, ("copy", "merge")),
        ({"adapters": "frozen base", "readable": False}, ("copy", "merge")),
        ({"adapters": "frozen base", "readable": False, "sharded": True}, ("copy", "side")),
        ({"adapters": "frozen base", "on_cpu": True}, ("copy", "merge")),
        ({"adapters": "frozen base", "on_cpu": True, "sharded": True}, ("copy", "side")),
        ({"adapters": "trained base"}, ("copy", "merge")),
        ({"adapters": "trained base", "sharded": True}, ("copy", "merge")),
    ],
)
def test_defaults(settings, expected):
    assert chosen(**settings) == expected


# -- the estimate ----------------------------------------------------------------------------------


def planned(on_gpu, num_processes=1, **knobs):
    config = RLHFConfig(actor_model_name_or_path="x", critic_model_name_or_path="y", **knobs)
    choice = planned_choice(config, num_processes, on_gpu)
    return choice.layout, choice.lora


@pytest.mark.parametrize(
    ("num_processes", "knobs", "layout"),
    [
        (1, {"actor_zero_stage": 2}, "zero_copy"),
        (8, {"actor_zero_stage": 2}, "zero_copy"),
        (1, {"actor_zero_stage": 3}, "zero_copy"),
        (2, {"actor_zero_stage": 3}, "copy"),
        (1, {"actor_zero_stage": 3, "offload": ["params"]}, "copy"),
        (1, {"actor_zero_stage": 3, "offload": ["auto"]}, "copy"),
        (8, {"actor_zero_stage": 2, "inference_tp_size": 2}, "copy"),
        (1, {"actor_zero_stage": 2, "rollout_layout": "copy"}, "copy"),
        (1, {"actor_lora_dim": 8, "only_optimize_lora": False}, "copy"),
    ],
)
def test_the_plan_for_gpus(num_processes, knobs, layout):
    assert planned(True, num_processes, **knobs)[0] == layout


@pytest.mark.parametrize(
    ("zero", "has_adapters"),
    [
        (3, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, False), (2, False), (3, False), (0, True), (2, True))
        ),
    ],
)
def test_the_plan_is_what_the_run_does(zero, has_adapters):
    """On a CPU, for each layout."""
    actor = Actor(build("llama"), zero, has_adapters)
    knobs = {"actor_zero_stage": zero, "actor_lora_dim": 4 * has_adapters}
    knobs |= {"only_optimize_lora": has_adapters}
    for layout in ("auto", "copy", "zero_copy"):
        form = actor.form(layout=layout)
        layout, lora = planned(False, rollout_layout=layout, **knobs)
        said = {"copy": "its own copy", "zero_copy": "training's own weights"}[layout]
        assert said in form.describe()
        assert (f"LoRA {lora}" in form.describe()) == has_adapters
