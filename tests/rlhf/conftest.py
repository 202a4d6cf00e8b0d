from types import SimpleNamespace

import pytest
import tiny_models

from dschat.config import RLHFConfig
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.collector import Collector, RolloutPolicy
from dschat.rlhf.prompts import PromptQueue
from dschat.runtime.deepspeed_engine import unwrap


@pytest.fixture
def collector_of():
    """``collector_of(*functions, tokenizer=..., reward=..., **flags)``: without models, but perhaps
    a reward model. Its reward functions are closed after the test.
    """
    made = []

    def make(*functions, tokenizer=None, reward=None, **flags):
        tokenizer = tokenizer or tiny_models.tokenizer()
        engine = SimpleNamespace(reward=reward, teacher=None, num_iters=1, tokenizer=tokenizer)
        args = RLHFConfig(**flags)
        made.append(RewardFunctions(args, functions))
        return Collector(engine, args, made[-1], RolloutPolicy(PromptQueue()))

    yield make
    for functions in made:
        functions.close()


@pytest.fixture
def kept_gradients():
    """``kept_gradients(engine)``: name -> gradient of the micro-batches since the last step, before
    it is clipped. Without ZeRO.
    """
    handles = []

    def keep(engine):
        kept = {}
        for name, p in unwrap(engine).named_parameters():

            def note(p, name=name):
                kept[name] = p.grad.clone()

            handles.append(p.register_post_accumulate_grad_hook(note))
        return kept

    yield keep
    for handle in handles:
        handle.remove()
