"""Makes a generator on transformers' own module, after it was held against plain forwards.

For families that the architecture table does not have: the engine, or the fallback's loop.
"""

from typing import TYPE_CHECKING

from dschat.inference.engine import InferenceEngine
from dschat.inference.engine_config import EngineConfig
from dschat.inference.hf_generator import HuggingFaceGenerator
from dschat.inference.model.architectures import UnsupportedModel
from dschat.inference.self_check import decoding_problem
from dschat.inference.stats import GenerationStats
from dschat.models.training_engine import without_adapters

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def module_engine(
    module: "PreTrainedModel | PeftModel", sizes: EngineConfig, is_checked: bool = False
) -> InferenceEngine:
    """An engine on ``module``, whose weights must be `ModuleWeights.in_use` while the engine runs.

    ``is_checked``: its family has been held against plain forwards before.

    Raises:
        UnsupportedModel: the module cannot run so, or its log-probs differ from its own.
    """
    weight, config = next(module.parameters()), without_adapters(module).config
    engine = InferenceEngine(config, weight.dtype, weight.device, sizes, module=module)
    if not is_checked:
        weights, windows = engine.weights, engine.spec.windows
        # NOTE: with the same products: rounding weights to 8 bits is no wrong decoding.
        plain = weights.products_in_use() if sizes.quantization != "off" else None
        checked = engine.num_tokens, engine.max_seq_len, windows, plain
        problem = decoding_problem(engine, module, weights.in_use(), *checked)
        if problem is not None:
            raise UnsupportedModel(f"{type(module).__name__} in the engine: {problem}")
    engine.stats = GenerationStats()
    return engine


def module_generator(
    module: "PreTrainedModel | PeftModel", sizes: EngineConfig, is_checked: bool = False
) -> InferenceEngine | HuggingFaceGenerator:
    """`module_engine`; or the fallback, for families that it cannot run.

    Raises:
        UserError: the fallback cannot run the module either.
    """
    try:
        return module_engine(module, sizes, is_checked)
    except UnsupportedModel as reason:
        ids = sizes.stop_ids, sizes.num_tokens
        return HuggingFaceGenerator(module, *ids, self_check=not is_checked, reason=reason)
