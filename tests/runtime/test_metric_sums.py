"""Metrics of micro-batches: exact sums, and nothing read from the device before the step's end.

Reads are found with tensors on the meta device, which raises at each.
"""

from types import SimpleNamespace

import pytest
import torch
from step_cases import Case, ppo_config
from step_rows import pair_rows, sft_rows
from tiny_models import PAD

from dschat.config import RewardConfig
from dschat.inference.protocol import Rollout
from dschat.rlhf import trainer
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.optimizer_step import sum_parts
from dschat.supervised.preference import Pairs, PreferenceTask
from dschat.supervised.tasks import RewardTask, SFTTask


def test_sums_are_exact_for_every_dtype():
    tenth = torch.tensor(0.1)
    parts = [{"loss": tenth, "tokens": torch.tensor(2**24 + 1)}, {"loss": tenth.double()}]
    parts += [{"loss": torch.tensor(0.3, dtype=torch.float64), "rare": torch.tensor(True)}]
    fp32_tenth = 0.100000001490116119384765625
    expected = {"loss": fp32_tenth + fp32_tenth + 0.3, "tokens": 16777217.0, "rare": 1.0}
    assert sum_parts(parts) == expected
    assert sum_parts([]) == {}


def _score_model(rows):
    return torch.zeros(rows.columns.shape, device=rows.columns.device, requires_grad=True)


def _language_model(rows):
    return _score_model(rows), None


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "ipo", "kto"])
def test_supervised_losses_read_nothing_from_the_device(kind):
    if kind == "sft":
        task, model, rows = SFTTask(), _language_model, sft_rows()
    elif kind == "reward":
        task, model, rows = RewardTask(), _score_model, pair_rows()
    else:
        task, model = PreferenceTask(RewardConfig(loss=kind)), _language_model
        rows = Pairs(pair_rows(), max_len=20)
    batch = task.collate([rows[0], rows[1]])
    total, sums = task.loss(model, batch.to("meta"))
    assert {value.device.type for value in (total, *sums.values())} == {"meta"}
    assert not any(value.requires_grad for value in sums.values())


def test_policy_and_value_losses_read_nothing_from_the_device(models_folder, monkeypatch):
    args = ppo_config(Case("ppo"), models_folder)
    args.kl_in_loss, args.kl_estimator, args.entropy_coef = True, "k3", 0.1
    rollout = Rollout([[4, 5], [6]], [[-1.0, -2.0], [-3.0]], ["stop", "length"])
    batch = from_rollout([[3], [2, 3]], rollout, PAD).to("meta")
    per_action = torch.zeros(2, 2, device="meta", requires_grad=True)
    monkeypatch.setattr(trainer, "action_logprobs", lambda *_: (per_action, per_action))
    monkeypatch.setattr(trainer, "action_values", lambda *_: per_action)
    stub = SimpleNamespace(
        args=args,
        engine=SimpleNamespace(actor=None, critic=object(), has_reference=True),
        kl=SimpleNamespace(value=0.1),
        _measures_gap=True,
        _is_on_policy=False,
    )
    step = SimpleNamespace(backward=lambda loss: loss.backward())
    actor = DeepSpeedPPOTrainer._actor_micro_batch(stub, step, batch)
    critic = DeepSpeedPPOTrainer._critic_micro_batch(stub, step, batch)
    assert {"policy_loss", "kl_loss", "entropy", "mismatch_kl"} < set(actor)
    for value in (*actor.values(), *critic.values()):
        assert value.device.type == "meta"
        assert not value.requires_grad
