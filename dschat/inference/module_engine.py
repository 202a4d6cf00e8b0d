"""Makes an engine that runs transformers' own module, after it was held against plain forwards.

For families that the architecture table does not have.
"""

import logging
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from dschat.inference.engine import InferenceEngine
from dschat.inference.engine_config import EngineConfig
from dschat.inference.model.architectures import UnsupportedModel
from dschat.inference.model.module_decoder import paged
from dschat.inference.protocol import SamplingParams
from dschat.inference.stats import GenerationStats
from dschat.losses import token_logprobs

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger("dschat")

_CHECKED_TOKENS, _SHORT, _LONG = 8, 5, 4096  # per answer; of the prompts, at most
# Largest difference of a sequence's mean log-prob, in nats, that counts as rounding. Observed: 1e-6
# to 1e-4 in fp32, 0.9 to 30 with wrong results. In 16 bits a MoE router may choose another expert.
TOLERANCE = {torch.float32: 0.01}
TOLERANCE_16_BIT = 0.25


def module_engine(
    module: "PreTrainedModel | PeftModel",
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    sizes: EngineConfig,
) -> InferenceEngine:
    """An engine on ``module``, which must be `paged` while the engine runs.

    Raises:
        UnsupportedModel: the module cannot run so, or its log-probs differ from its own.
    """
    engine = InferenceEngine(config, dtype, device, sizes, module=module)
    gap = _gap(engine, module)
    if not gap <= TOLERANCE.get(dtype, TOLERANCE_16_BIT):
        raise UnsupportedModel(
            f"{type(module).__name__}: with the engine's cache log-probs differ by {gap:.2g} nats"
        )
    engine.stats = GenerationStats()
    return engine


@torch.no_grad()
def _gap(engine: InferenceEngine, module: "PreTrainedModel | PeftModel") -> float:
    """The largest mean, over an answer, of |log-prob here - log-prob of a plain forward|; for two
    answers each to a prompt longer than any window, and a short one.
    """
    new = min(_CHECKED_TOKENS, engine.max_seq_len // 2)
    longest = max([40, *(2 + window for window in engine.spec.windows if window)])
    longest = max(1, min(longest, _LONG, engine.max_seq_len - new))
    draw = torch.Generator().manual_seed(0)
    shape = (longest,), (min(_SHORT, longest),)
    prompts = [torch.randint(engine.num_tokens, size, generator=draw).tolist() for size in shape]
    sampling = SamplingParams(new, n=2, ignore_eos=True)
    with paged(module):
        rollout = engine.generate(prompts, sampling)
    gaps, training = [], module.training
    module.eval()
    for i, drawn in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
        prompt = prompts[i // 2]
        ids = torch.tensor([prompt + drawn[0]], device=engine.device)
        logits = module(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
        plain = token_logprobs(logits, ids[:, len(prompt) :])[0].cpu()
        gaps.append((torch.tensor(drawn[1]) - plain).abs().mean())
    module.train(training)
    return float(torch.stack(gaps).nan_to_num(nan=torch.inf).max())
