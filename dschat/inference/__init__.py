"""Generation without DeepSpeed: architecture table, decoder, KV cache, scheduler, engine."""

from dschat.inference.arch import UnsupportedModel, model_spec
from dschat.inference.engine import InferenceEngine
from dschat.rollout import Rollout, SamplingParams

__all__ = ["InferenceEngine", "Rollout", "SamplingParams", "UnsupportedModel", "model_spec"]
