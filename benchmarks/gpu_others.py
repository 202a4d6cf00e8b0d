"""Other engines beside the sides of `gpu.py`, where they can run: else `Unavailable` says why.

transformers' `generate` and vLLM. Times are of the host's clock, after the device has finished.
"""

import tempfile
from importlib.util import find_spec

import torch
from gpu_cases import GpuCase
from gpu_floor import kv_bytes_per_token
from report import clock
from rollout_sides import GenerateSide
from rollout_workloads import MODELS, Case
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import dschat.distributed as dist
from dschat.config.errors import first_line
from dschat.models.training_engine import evaluating


class Unavailable(Exception):
    """An engine that cannot run here; the text says why."""


class Generate:
    """transformers' `generate` on ``module``."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        module.generation_config.eos_token_id = None
        self.module, self.side = module, GenerateSide(case, module, dist.device())

    def run(self, seed: int) -> dict[str, float]:
        with evaluating(self.module):
            seconds = self.side.run(seed)
        return {"rollout_ms": 1e3 * seconds, "tokens_per_s": self.side.case.answer_tokens / seconds}


class VLLM:
    """vLLM with random weights, in bf16, as its defaults have it but the prefix cache."""

    def __init__(self, case: Case) -> None:
        from vllm import LLM

        self.case, config = case, MODELS[case.model]()
        # As a published checkpoint has it. Without, vLLM serves the model as one of embeddings.
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        self._folder = tempfile.TemporaryDirectory()
        config.save_pretrained(self._folder.name)
        self.llm = LLM(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=case.prompt_tokens + case.new_tokens,
            max_num_seqs=case.slots,
            gpu_memory_utilization=0.4,  # less must be free; it takes what its cache needs
            kv_cache_memory_bytes=_cache_bytes(case),
            seed=0,  # of the engine: requests with seeds of their own are drawn one by one
            enable_prefix_caching=False,  # each round has the same prompts
        )
        self.prompts = [{"prompt_token_ids": prompt} for prompt in case.make_prompts()]

    def run(self, seed: int) -> dict[str, float]:
        from vllm import SamplingParams

        case = self.case
        sampling = SamplingParams(
            temperature=case.temperature,
            max_tokens=case.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        started = clock(dist.device())
        outputs = self.llm.generate(self.prompts, sampling, use_tqdm=False)
        seconds = clock(dist.device()) - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == case.prompts * case.new_tokens
        return {"rollout_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}


def _cache_bytes(case: Case) -> int:
    """Bytes of keys and values of all sequences, in blocks of 16 tokens and one more for each."""
    blocks = -(-(case.prompt_tokens + case.new_tokens) // 16) + 1
    return case.slots * blocks * 16 * kv_bytes_per_token(MODELS[case.model](), torch.bfloat16)


def make(name: str, case: GpuCase, module: nn.Module, stage: int) -> Generate | VLLM:
    """One of `gpu_cases.OTHERS`; ``module``: the one in training, under ZeRO ``stage``.

    Raises:
        Unavailable: it is not installed, cannot be built, or cannot run this case.
    """
    assert case.rollout is not None
    if stage == 3:
        raise Unavailable("measured under ZeRO-2 only")
    if name == "generate":
        return Generate(case.rollout, module)
    if find_spec("vllm") is None:
        raise Unavailable("it is not installed")
    try:
        runner = VLLM(case.rollout)
        runner.run(seed=0)
        return runner
    # Whatever a missing compiler, operator or architecture raises in another library.
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {first_line(error)}") from error
