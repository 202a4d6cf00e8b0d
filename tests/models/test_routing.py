"""Experts that training is given run in place of the routers' choice, with weights and gradients of
the family's own code.
"""

import pytest
import torch
import torch.nn.functional as F
from quick import each_once, some
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM

from dschat.config import UserError
from dschat.models.heads import LanguageModel
from dschat.models.packing import pack
from dschat.models.routing import AGREEMENT, replay_routing, routers_of, routing_metrics
from tests.models.test_router_loss import FAMILIES, ROWS, recorded
from tests.observability.test_flops import COUNTED, config_of

KNOWN = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v3")
SHARED = [[5, 9, 11, 3, 8, 20, 31], [5, 9, 11, 7], [12, 40, 41]]
PROMPTS = [3, 3, 1]


def packed_model(family: str, packing: str = "auto"):
    torch.manual_seed(0)
    config = config_of(family, **(COUNTED | FAMILIES)[family])
    attention = None if family == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = recorded(model.train()) if family in KNOWN else model.train()
    packed = LanguageModel(model, packing)
    packed.check(torch.device("cpu"))
    return packed


def all_columns(rows, prompts=None, experts=None):
    return pack(rows, [range(len(row) - 1) for row in rows], prompts, experts)


class Chosen:
    """The experts of the last forward, by router, in the order of the stream: (N, routers, k)."""

    def __init__(self, packed):
        self._outputs = []
        for router in routers_of(packed.base):
            router.register_forward_hook(lambda m, args, out: self._outputs.append(out))

    def take(self):
        outputs, self._outputs[:] = list(self._outputs), []
        self.num_experts = outputs[0][0].shape[-1]
        return torch.stack([output[-1] for output in outputs], 1)


def gradients(packed, rows):
    packed.zero_grad()
    logprobs, _ = packed(rows)
    logprobs.sum().backward()
    grads = [p.grad for p in packed.parameters() if p.grad is not None]
    return logprobs.detach(), parameters_to_vector(grads)


@pytest.mark.parametrize(("family", "checkpointed"), each_once(KNOWN, [True, False]))
def test_its_own_choice_changes_nothing(family, checkpointed):
    packed = packed_model(family)
    if checkpointed:
        packed.base.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(packed, all_columns(SHARED, PROMPTS))
    replay_routing(packed)
    chosen = Chosen(packed)
    with torch.no_grad():
        packed(all_columns(SHARED))
    own = chosen.take().split([len(row) for row in SHARED])
    rows = all_columns(SHARED, PROMPTS, [x.to(torch.int8) for x in own])
    for actual, wanted in zip(gradients(packed, rows), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert routing_metrics(packed) == {AGREEMENT: 1.0}
    assert routing_metrics(packed) == {}


@pytest.mark.parametrize("family", some(KNOWN, ["qwen3_moe", "gpt_oss", "deepseek_v3"]))
def test_the_given_experts_run_and_others_choose(family):
    """In the first row all tokens but the last are given, in the second one token, then none."""
    packed = packed_model(family)
    replay_routing(packed)
    chosen = Chosen(packed)
    with torch.no_grad():
        plain, _ = packed(all_columns(ROWS))
    own = chosen.take()
    own = own.split([len(row) for row in ROWS])
    given = [(own[0][:-1] + 1) % chosen.num_experts, own[1][:1], own[2][:0]]
    missing = [(0, 0, 0, 0, 0, len(row) - len(x)) for row, x in zip(ROWS, given, strict=True)]
    rows = [F.pad(x.to(torch.int16), p, value=-1) for x, p in zip(given, missing, strict=True)]
    logprobs, _ = packed(all_columns(ROWS, experts=rows))
    now = chosen.take().split([len(row) for row in ROWS])
    assert torch.equal(now[0][:-1], given[0])
    assert torch.equal(now[1], own[1])
    assert torch.equal(now[2], own[2])
    rest = len(ROWS[0]) - 1
    assert torch.equal(logprobs[rest:], plain[rest:])
    assert (logprobs[:rest] - plain[:rest]).abs().max() > 1e-3
    assert 0 < routing_metrics(packed)[AGREEMENT] < 0.5


def test_a_given_expert_trains_its_router():
    """Weights come from training's logits: also of an expert that the router would not choose."""
    packed = packed_model("mixtral")
    replay_routing(packed)
    given = [torch.tensor([[[1, 3]] * 4] * 7, dtype=torch.int8)]
    gradients(packed, all_columns([ROWS[0]], experts=given))
    grad = routers_of(packed.base)[-1].weight.grad
    assert grad[[1, 3]].abs().sum() > 0


def test_a_later_forward_routes_itself():
    packed = packed_model("qwen3_moe")
    with torch.no_grad():
        expected, _ = packed(all_columns(ROWS))
        other, _ = packed(all_columns(ROWS[1:]))
        replay_routing(packed)
        given = [torch.zeros(len(row), 4, 2, dtype=torch.int8) for row in ROWS]
        given = [x + torch.tensor([0, 1], dtype=torch.int8) for x in given]
    gradients(packed, all_columns(ROWS, experts=given))
    with torch.no_grad():
        assert torch.equal(packed(all_columns(ROWS[1:]))[0], other)
        # As a rollout runs the module itself: not through its rows.
        logits = packed.model(input_ids=torch.tensor([ROWS[1]])).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ROWS[1][1:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs, other[: len(ROWS[1]) - 1], atol=1e-5, rtol=0)
    assert torch.equal(packed(all_columns(ROWS))[0].detach(), expected)


@pytest.mark.parametrize(
    ("family", "packing", "reason"),
    [
        ("llama", "auto", "it has no experts"),
        ("qwen3_moe", "off", "its rows are padded, not packed"),
        ("jetmoe", "auto", "does not return torch.topk's choice"),
        ("phimoe", "auto", "does not return torch.topk's choice"),
    ],
)
def test_what_cannot_be_replayed_is_refused(family, packing, reason):
    packed = packed_model(family, packing)
    with pytest.raises(UserError, match=f"--moe_routing_replay: not with a .*: .*{reason}"):
        replay_routing(packed)
