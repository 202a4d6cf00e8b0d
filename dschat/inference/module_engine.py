"""Makes an engine that runs transformers' own module, after it was held against plain forwards.

For families that the architecture table does not have.
"""

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from dschat.inference.engine import InferenceEngine
from dschat.inference.engine_config import EngineConfig
from dschat.inference.model.architectures import UnsupportedModel
from dschat.inference.protocol import SamplingParams
from dschat.inference.self_check import gap_to_plain, tolerance
from dschat.inference.stats import GenerationStats

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_CHECKED_TOKENS, _SHORT, _LONG = 8, 5, 4096  # per answer; of the prompts, at most


def module_engine(
    module: "PreTrainedModel | PeftModel",
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    sizes: EngineConfig,
    is_checked: bool = False,
) -> InferenceEngine:
    """An engine on ``module``, whose weights must be `ModuleWeights.in_use` while the engine runs.

    ``is_checked``: its family has been held against plain forwards before.

    Raises:
        UnsupportedModel: the module cannot run so, or its log-probs differ from its own.
    """
    engine = InferenceEngine(config, dtype, device, sizes, module=module)
    if not is_checked and (gap := _gap(engine, module)) > tolerance(module):
        raise UnsupportedModel(
            f"{type(module).__name__}: with the engine's cache log-probs differ by {gap:.2g} nats"
        )
    engine.stats = GenerationStats()
    return engine


def _gap(engine: InferenceEngine, module: "PreTrainedModel | PeftModel") -> float:
    """`gap_to_plain` of two answers each to a prompt longer than any window, and a short one."""
    new = min(_CHECKED_TOKENS, engine.max_seq_len // 2)
    longest = max([40, *(2 + window for window in engine.spec.windows if window)])
    longest = max(1, min(longest, _LONG, engine.max_seq_len - new))
    draw = torch.Generator().manual_seed(0)
    shape = (longest,), (min(_SHORT, longest),)
    prompts = [torch.randint(engine.num_tokens, size, generator=draw).tolist() for size in shape]
    sampling = SamplingParams(new, n=2, ignore_eos=True)
    with engine.weights.in_use():
        rollout = engine.generate(prompts, sampling)
    return gap_to_plain(module, prompts, rollout, sampling.n)
