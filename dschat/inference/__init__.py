"""Generation without DeepSpeed: architecture table, decoder, KV cache, scheduler, engine."""

from dschat.inference.engine import InferenceEngine
from dschat.inference.model.architectures import UnsupportedModel, model_spec
from dschat.inference.protocol import Rollout, SamplingParams

__all__ = ["InferenceEngine", "Rollout", "SamplingParams", "UnsupportedModel", "model_spec"]
