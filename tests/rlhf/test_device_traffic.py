"""Micro-batches on fake CUDA: one copy to the device, no host read before the backward pass."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import DEVICE, READ, TO_DEVICE, TO_HOST, fake_cuda
from quick import slow
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.config import RLHFConfig
from dschat.inference.protocol import Rollout
from dschat.losses import AdaptiveKL
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.packing.varlen import VarlenKernel, _mapped
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.optimizer_step import OptimizerStep

CONFIG = CONFIGS["llama"]()
CONFIG.num_labels = 1
PROMPTS = [[1, 2, 3], [1, 2, 3], [4]]
ANSWERS = [[5, 6], [7], [8, 9, 10]]
BEHIND = "_to_copy behind the host"


class Engine:
    """What `OptimizerStep` calls of a DeepSpeed engine.

    NOTE: torch's CPU build runs no backward pass on a fake CUDA device.
    """

    def __init__(self, watch):
        self._watch, self.counts = watch, Counter()

    def set_gradient_accumulation_boundary(self, is_boundary):
        pass

    def backward(self, loss, scale_wrt_gas):
        assert loss.requires_grad
        assert loss.device == DEVICE
        self.counts = Counter({name: n for (_, name), n in self._watch.counts.items()})


def host_batch():
    logprobs = [[-1.0] * len(answer) for answer in ANSWERS]
    rollout = Rollout(ANSWERS, logprobs, ["stop"] * len(ANSWERS))
    return from_rollout(PROMPTS, rollout, 0).take([0, 1, 2], torch.device("cpu"))


def micro_batch(run, kind, wrap, **options):
    """Counts of what a trainer's micro-batch does before its backward pass."""
    batch = host_batch()
    with fake_cuda() as watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(VarlenKernel, "supports", lambda query: True)
        with DEVICE:
            model = wrap(kind.from_config(CONFIG, dtype=torch.bfloat16), packing="on")
        watch.counts.clear()
        engine = Engine(watch)
        trainer = SimpleNamespace(
            args=RLHFConfig.from_namespace(options),
            engine=SimpleNamespace(actor=model, critic=model, has_reference=True),
            kl=AdaptiveKL(0.1, None, 1),
            _is_on_policy=False,
            _measures_gap=True,
        )
        step = OptimizerStep(engine, num_micro_batches=1, denominator=6.0)
        run(trainer, step, _mapped(batch, watch.mode.from_tensor).to(DEVICE))
    return engine.counts


ACTOR = DeepSpeedPPOTrainer._actor_micro_batch, AutoModelForCausalLM, LanguageModel
CRITIC = (
    DeepSpeedPPOTrainer._critic_micro_batch,
    AutoModelForSequenceClassification,
    ScoreModel,
)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        *slow([(ACTOR, {}), (CRITIC, {})]),
        (ACTOR, {"entropy_coef": 0.1, "kl_in_loss": True, "aggregation": "sequence"}),
    ],
    ids=["actor", "critic", "actor, entropy and KL"],
)
def test_one_copy_and_no_read_before_backward(parts, options):
    counts = micro_batch(*parts, **options)
    assert counts[BEHIND] == 1
    assert counts[READ] == counts[TO_DEVICE] == counts[TO_HOST] == 0
    assert counts["_flash_attention_forward"] == 2 * 2  # pieces and answers, in two layers
