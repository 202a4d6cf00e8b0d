"""What `dir`, `help` and a mistyped setting show of the public names."""

import copy
import pickle
from dataclasses import fields
from inspect import Parameter, getdoc, signature

import pytest

import dschat
from dschat import DPOTrainer, GRPOTrainer, RLHFConfig, SFTConfig, SFTTrainer, UserError


def test_dir_lists_what_can_be_imported():
    assert {*dschat.__all__, "__version__"} <= set(dir(dschat))
    assert len(dschat.__all__) == 13


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer, GRPOTrainer])
def test_trainers_show_their_settings(trainer):
    shown = signature(trainer).parameters
    doc = [line.strip() for line in getdoc(trainer).splitlines()]
    settings = {f.name: f for f in fields(trainer.config_class) if f.name != trainer.model_flag}
    assert settings.keys() < shown.keys()
    assert not shown.keys() & {trainer.model_flag, "flags", "self"}
    assert all(p.kind is not Parameter.VAR_KEYWORD for p in shown.values())
    config = trainer.config_class(**trainer.defaults)
    for name, f in settings.items():
        assert shown[name].default in (getattr(config, name), ()), name
        is_argument = name in ("environment", "tools", "agent")  # in Python an object
        assert is_argument or f"{name}: {f.metadata['help']}" in doc


def test_what_is_no_setting_is_shown_too():
    shown = list(signature(GRPOTrainer).parameters)
    assert shown[:3] == ["model", "data", "args"]
    assert {"callbacks", "reward_fns", "environment"} <= set(shown)
    assert shown.index("kl_coef") < shown.index("kl_horizon")  # as --help has it


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_step": 3}, "^RLHFConfig: unknown setting max_step; did you mean max_steps[?]$"),
        (
            {"beta": 0.1},
            "^RLHFConfig: unknown setting beta; "
            "use kl_coef: by default 0.1 for gae, 0 for grpo as in TRL$",
        ),
        (
            {"zzz": 1, "max_step": 3},
            "^RLHFConfig: unknown settings: zzz, max_step .did you mean max_steps",
        ),
    ],
)
def test_an_unknown_setting_is_named_with_the_closest_one(given, words):
    with pytest.raises(UserError, match=words):
        RLHFConfig(**given)


def test_configs_are_copied_and_pickled():
    config = SFTConfig(max_steps=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
