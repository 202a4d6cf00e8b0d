"""Other engines beside the sides of `gpu.py`, where they can run: else `Unavailable` says why.

transformers' `generate`, DeepSpeed's hybrid engine without and with CUDA graphs, and vLLM. Their
times are of the host's clock, after the device has finished.
"""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec

import torch
from gpu_cases import GpuCase
from gpu_floor import kv_bytes_per_token
from report import clock
from rollout_hybrid import make_engine
from rollout_sides import GenerateSide, make_prompts
from rollout_workloads import MODELS, Case
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import dschat.distributed as dist
from dschat.config.errors import first_line
from dschat.runtime.deepspeed_engine import ZeroSettings, unwrap


class Unavailable(Exception):
    """An engine that cannot run here; the text says why."""


class Generate:
    """transformers' `generate` on ``module``; ``owner``, an engine or the module, goes to eval."""

    def __init__(self, case: Case, module: nn.Module, owner: nn.Module | None = None) -> None:
        module.generation_config.eos_token_id = None
        self.owner, self.side = owner or module, GenerateSide(case, module, dist.device())

    def run(self, seed: int) -> dict[str, float]:
        trained = self.owner.training
        self.owner.eval()
        with torch.no_grad():
            timing = self.side.run(seed)
        self.owner.train(trained)
        return {"rollout_ms": 1e3 * timing.wall_s, "tokens_per_s": timing.rates()["tokens_per_s"]}


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
        ids = make_prompts(case, config.vocab_size).tolist()
        self.prompts = [{"prompt_token_ids": prompt} for prompt in ids]

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
    """Collective. One of `gpu_cases.OTHERS`; ``module``: the one in training, under ZeRO ``stage``.

    Raises:
        Unavailable: it is not installed, cannot be built, or cannot run this case.
    """
    assert case.rollout is not None
    if stage == 3:
        raise Unavailable("measured under ZeRO-2 only")
    if name == "generate":
        return Generate(case.rollout, module)
    if name == "vllm":
        if find_spec("vllm") is None:
            raise Unavailable("it is not installed")
        return _built(lambda: VLLM(case.rollout))
    if not case.stages:
        raise Unavailable("the model does not train")
    return _built(lambda: _hybrid_engine(case, graphs=name.endswith("-graphs")))


def _hybrid_engine(case: GpuCase, graphs: bool) -> Generate:
    rollout = case.rollout
    assert rollout is not None
    settings = {
        "enabled": True,
        "max_out_tokens": rollout.prompt_tokens + rollout.new_tokens,
        "enable_cuda_graph": graphs,
    }
    zero = ZeroSettings(
        2,
        torch.bfloat16 if dist.device().type == "cuda" else torch.float32,
        offload_optimizer=case.offload,
        overrides={"hybrid_engine": settings},
    )
    engine = make_engine(rollout, zero)
    if not engine._inference_containers:
        raise Unavailable("it would run transformers' own layers")
    if graphs and engine._decode_graphs is None:
        raise Unavailable("it refuses CUDA graphs")
    return Generate(rollout, unwrap(engine), engine)


def _built(make_runner: Callable[[], Generate | VLLM]) -> Generate | VLLM:
    """The runner, which has answered once."""
    try:
        runner = make_runner()
        runner.run(seed=0)
        return runner
    except Unavailable:
        raise
    # Whatever a missing compiler, operator or architecture raises in another library.
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {first_line(error)}") from error
