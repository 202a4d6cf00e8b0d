"""Generates answers and their log-probs with continuous batching over a paged KV cache.

An `InferenceEngine` is made from a transformers config and a stream of weights, without DeepSpeed
and without a transformers module. A prompt is computed once for all its samples, and an answer does
not depend on the other sequences of its batches. Threads may share an engine: they take turns.
"""

import copy
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from dschat.config.errors import UserError
from dschat.distributed import RankGroup
from dschat.distributed.memory import free_bytes
from dschat.inference.generators.engine_config import EngineConfig, device_named, require_current
from dschat.inference.kernels.cuda import MAX_HEAD_SIZE
from dschat.inference.model import step_kernels
from dschat.inference.model.architectures import model_spec
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.module_decoder import (
    AnyDecoder,
    ModuleDecoder,
    module_spec,
)
from dschat.inference.model.module_weights import ModuleWeights
from dschat.inference.model.positions import model_positions
from dschat.inference.model.spec import UnsupportedModel
from dschat.inference.model.states import StatePool, num_slots, state_bytes
from dschat.inference.model.weights import Weights
from dschat.inference.protocol import Answered, Rollout, SamplingParams, prompt_problem
from dschat.inference.requests.captured_core import CapturedCore
from dschat.inference.requests.core import Core
from dschat.inference.requests.cuda_graphs import CudaCapture
from dschat.inference.requests.sequence import Request
from dschat.inference.requests.stats import GenerationStats
from dschat.inference.requests.step_runner import StepRunner
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.checkpoint_tensors import names_on_disk, sound_weights
from dschat.startup.performance import avoid_cudnn_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InferenceEngine:
    """Generates with a causal LM.

    Args:
        config: the model's transformers config.
        dtype, device: of weights and cache.
        sizes: see `EngineConfig`.
        group: ranks that share weights and cache (tensor parallelism); they call `generate`
            together and pool their prompts.
        module: a causal LM of transformers with weights, which runs in place of our
            decoder, while they are `ModuleWeights.in_use`.

    Raises:
        UnsupportedModel: the decoder cannot run this model.
        UserError: a size that cannot work, by its name.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        sizes: EngineConfig | None = None,
        group: RankGroup | None = None,
        module: Any = None,
    ) -> None:
        require_current(device)
        avoid_cudnn_attention()
        self.config, self.dtype, self.device = config, dtype, device
        self.lock = threading.RLock()  # held by `generate`, and for each step of others
        self.group = group or RankGroup()
        self.spec = model_spec(config).in_dtype(dtype) if module is None else module_spec(module)
        self._sizes = sizes = sizes or EngineConfig()
        self.weights: Any = (
            Weights(self.spec, dtype, device, self.group)
            if module is None
            else ModuleWeights(module, self.spec, self.group)
        )
        self.stop_ids = sizes.stop_ids
        self.num_tokens = min(sizes.num_tokens or self.spec.vocab_size, self.spec.vocab_size)
        bound = model_positions(self.spec, config)
        self.max_seq_len, self.max_num_seqs = sizes.seq_len(bound), sizes.max_num_seqs
        on_gpu = device.type == "cuda"
        self.max_num_batched_tokens = sizes.batched_tokens(on_gpu)
        if sizes.cuda_graphs and not on_gpu:
            raise UserError(f"cuda_graphs needs a CUDA device; this one is a {device.type}")
        required = bool(sizes.cuda_graphs)
        self._capture = CudaCapture(required) if sizes.captures(on_gpu) else None
        page_size = sizes.tokens_per_page(
            self.max_seq_len, self.captures, self.bytes_per_token(), self._free_bytes()
        )
        self.page_size = min(self.group.gather_objects(page_size))  # the ranks' memory may differ
        self._cache: KVCache | None = None
        self._cached_loads = 0  # `Weights.loads` of the weights that filled it
        # The same after every `release_cache`. A cache too small is refused before weights load.
        self._cache_pages = None if sizes.kv_cache_gib is None else self._num_pages()
        self.module = module
        self._decoder: AnyDecoder | None = None
        self._kernels = step_kernels.choose(device) if self.captures else None
        if self._kernels is not None and self.spec.head_size > MAX_HEAD_SIZE:
            self._kernels = self._kernels.without("attention")
        self._separate_prefill = on_gpu
        self._samples_apart = False  # where nothing is captured; benchmarks compare both
        self._runner: StepRunner | None = None
        self._borrowed_addresses: list[int] = []
        is_models = sizes.max_seq_len is None or bound == self.max_seq_len
        self._length_flags = "the model's positions" if is_models else sizes.length_flags
        self.stats = GenerationStats()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Checkpoint,
        dtype: str = "float32",
        device: str = "cpu",
        **options: Any,
    ) -> "InferenceEngine":
        """An engine with the weights of a Hugging Face checkpoint: a folder or a hub name.

        ``options``: fields of `EngineConfig`; default for ``stop_ids``: the checkpoint's.

        Raises:
            UserError: the checkpoint is missing, damaged or incomplete (the tensor is named).
        """
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype} is unknown; choose from {', '.join(DTYPES)}")
        torch_device = device_named(device)
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path, "path")
        if checkpoint.brings_code():
            why = "needs its own Python code, which the inference engine does not run"
            raise UnsupportedModel(f"{checkpoint.name} {why}")
        checkpoint.require_causal_lm()
        config, generation = copy.deepcopy(checkpoint.config), checkpoint.generation_config
        config.tie_word_embeddings = config.tie_word_embeddings and not checkpoint.has_own_head
        stops = config.eos_token_id
        if generation is not None and generation.eos_token_id is not None:
            stops = generation.eos_token_id
        if "stop_ids" not in options and stops is not None:
            options["stop_ids"] = tuple(stops) if isinstance(stops, list) else (stops,)
        if not model_spec(config).reads_published:
            why = "has other tensors on disk than in transformers' module, which reads them"
            raise UnsupportedModel(f"{checkpoint.name} {why}")
        engine = cls(config, DTYPES[dtype], torch_device, EngineConfig(**options))
        engine.load_checkpoint(checkpoint)
        return engine

    def load_checkpoint(self, files: CheckpointFiles) -> None:
        """Load the weights of a checkpoint, with one of its tensors in memory at a time."""
        names = names_on_disk(files.keys, self.weights.names, self.spec.prefix)
        try:
            stored = ((names(key), entry.shape) for key, entry in files.headers.items())
            self.weights.check((name, shape) for name, shape in stored if name is not None)
            self.weights.load(sound_weights(files.tensors(names)))
        except UserError as error:
            if files.name in str(error):
                raise
            raise type(error)(f"{files.name}: {error}") from None

    def borrow_weights(self, tensors: dict[str, Tensor]) -> bool:
        """Read ``tensors`` (by Hugging Face name) in place; see `Weights.borrow`.

        A repeated call does nothing unless a tensor's address has changed. Returns whether it did:
        adapters must then be loaded again.
        """
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        if addresses == self._borrowed_addresses:
            return False
        self.weights.borrow(tensors)
        self._borrowed_addresses = addresses
        return True

    # -- memory ------------------------------------------------------------------------------------

    @property
    def max_positions(self) -> int:
        """Longest prompt + answer that fits the model's positions and the cache."""
        return min(self.max_seq_len, self.cache.num_pages * self.page_size)

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured as CUDA graphs."""
        return self._capture is not None

    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, on this rank."""
        return self.spec.token_bytes(self.group.size, self.dtype.itemsize)

    @property
    def cache(self) -> KVCache:
        """The KV cache, allocated on first use. Collective in the group then."""
        return self.allocate_cache()

    def allocate_cache(self) -> KVCache:
        """Collective in the group. Allocate the KV cache, unless there is one."""
        with self.lock:
            if self._cache is None:
                self._cache_pages = self._cache_pages or self._num_pages()
                self._cache = KVCache(
                    self.spec.num_attending,
                    self._cache_pages,
                    self.page_size,
                    self.weights.num_kv_heads,
                    self.spec.head_size,
                    self.dtype,
                    self.device,
                    keeps_prefixes=self.page_size < self.max_seq_len and not self.spec.states,
                    states=self._states(),
                    keeps_experts=self._sizes.keeps_experts,
                )
                self._cached_loads = self.weights.loads
            return self._cache

    def _states(self) -> StatePool | None:
        spec, count = self.spec, num_slots(self.max_num_seqs)
        return StatePool(spec.states, count, self.config, self.device) if spec.states else None

    def forget_prefixes(self) -> None:
        """Reuse no keys and values of earlier calls: the weights have changed in place."""
        with self.lock:
            if self._cache is not None:
                self._cache.forget()

    def _free_bytes(self) -> int:
        if self._sizes.kv_cache_gib is not None:
            return 0
        states = state_bytes(self.spec.states, self.max_num_seqs, self._capture is not None)
        return max(0, free_bytes(self.device) - sum(states))

    def _num_pages(self) -> int:
        page_bytes = self.page_size * self.bytes_per_token()
        free = self._free_bytes()
        num_pages = self._sizes.num_pages(self.max_seq_len, self.page_size, page_bytes, free)
        # All ranks of a group must have the same number of pages.
        num_pages = min(self.group.gather_objects(num_pages))
        if num_pages < 1:
            cache_gib = self._sizes.cache_bytes(free) / 2**30
            raise UserError(
                f"a KV cache of {cache_gib:.3g} GiB is smaller than a page of {self.page_size} "
                f"tokens ({page_bytes / 2**30:.3g} GiB); raise kv_cache_gib or lower max_seq_len"
            )
        return num_pages

    def release_cache(self) -> None:
        """Free the KV cache and the graphs that read it; the next `generate` allocates both."""
        with self.lock:
            self._cache = self._runner = None

    def release_weights(self) -> None:
        """Free the weights unless they are borrowed; `weights.load` must be called again."""
        with self.lock:
            self.weights.drop()
            self._decoder = self._runner = None

    # -- generation --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        max_new_tokens: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        """Answer every prompt ``sampling.n`` times; see `dschat.inference.protocol.Generator`.

        Collective in the tensor-parallel group, whose ranks may have different numbers of prompts,
        also none. ``max_new_tokens``: limit of each prompt's answers (default:
        ``sampling.max_new_tokens`` for all).

        Raises:
            UserError: an empty prompt, an id outside the vocabulary, or a prompt too long for the
                cache or the model, by its number; or open streams hold the cache.
        """
        indices = list(range(len(prompts))) if indices is None else indices
        default = [sampling.max_new_tokens] * len(prompts)
        limits = default if max_new_tokens is None else max_new_tokens
        for name, values in (("indices", indices), ("max_new_tokens", limits)):
            if len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts")
        mine = [
            Request(ids, sampling, number, limit)
            for ids, number, limit in zip(prompts, indices, limits, strict=True)
        ]
        rows = {request: row for row, request in enumerate(mine)}
        with self.lock, closing(self.core()) as core:
            core.add_all(mine, None)
            for event in core.events():
                if answered is None or not event.is_last:
                    continue
                request = event.sequence.request
                if request in rows and request.is_complete:
                    answered(rows.pop(request), request.rollout())
        return Rollout.joined(request.rollout() for request in mine)

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[int, None, None]:
        """The tokens of one answer as they are decoded. Closing the iterator stops the answer."""
        if sampling.n > 1:
            raise UserError(f"n {sampling.n}: a stream is one answer; call generate for more")
        with closing(self.core(streaming=True)) as core:
            core.add_all([Request(prompt, sampling)], None)
            for event in core.events():
                yield event.token

    def core(self, streaming: bool = False) -> Core:
        """What answers requests step by step; see `Core`. Collective in the group on first use."""
        return (CapturedCore if self.captures else Core)(self, streaming)

    @property
    def keeps_apart(self) -> tuple[bool, bool]:
        """``separate_prefill`` and ``samples_apart`` of a `Scheduler` for this engine."""
        return self._separate_prefill or self.captures, self._samples_apart or self.captures

    def problem(self, requests: list[Request]) -> str | None:
        """One line about the first request that cannot be answered, or None."""
        cache = self.cache  # NOTE: a collective, so before any return
        for i, request in enumerate(requests):
            for ids in [request.ids, *([request.forced] if request.forced else [])]:
                if (fault := prompt_problem(i, ids, self.spec.vocab_size)) is not None:
                    return fault
            ids = [*request.ids, *request.forced]
            limit = request.max_new_tokens - len(request.forced)
            if request.max_new_tokens < 1:
                return f"max_new_tokens {limit} of prompt {i} must be at least 1"
            total = len(ids) + limit
            if total > self.max_seq_len:
                return (
                    f"prompt {i} has {len(ids)} tokens; with {limit} new ones that exceeds "
                    f"{self._length_flags} = {self.max_seq_len}"
                )
            if cache.pages_for(total) > cache.num_pages:
                return (
                    f"prompt {i} has {len(ids)} tokens; with {limit} new ones that exceeds the KV "
                    f"cache ({cache.num_pages} pages of {cache.page_size} tokens); raise "
                    "kv_cache_gib"
                )
        return None

    def step_runner(self) -> StepRunner:
        """The step runner, made on first use and after a release; new weights empty the cache."""
        if self._cached_loads != self.weights.loads:
            self.cache.forget()
            self._cached_loads = self.weights.loads
        if self._decoder is None and self.module is not None:
            self._decoder = ModuleDecoder(self.module, self.spec, self.weights)
        elif self._decoder is None:
            self._decoder = Decoder(self.spec, self.config, self.weights, self.max_seq_len)
        if self._runner is None:
            sizes = self.max_num_seqs, self.max_seq_len
            options = self._capture, self._kernels
            self._runner = StepRunner(self._decoder, self.cache, *sizes, *options)
        return self._runner
