"""Generates with transformers' own module: in the engine, or by the module's ``generate``.

The engine runs it for families whose parts our decoder does not find. For those that the engine
cannot run either, ``generate`` decodes prompts of one length together, so that nothing is padded or
masked. The draws are ours, and log-probs are those of plain forwards.
"""

import inspect
import logging
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from dschat.config import UserError
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.generators.engine_config import EngineConfig
from dschat.inference.generators.self_check import decoding_problem, plain_logprobs
from dschat.inference.model.spec import UnsupportedModel
from dschat.inference.protocol import Answered, Rollout, SamplingParams, prompt_problem
from dschat.inference.requests.sequence import Request, Sequence
from dschat.inference.requests.stats import GenerationStats
from dschat.inference.sampling import sample, uniforms
from dschat.models.heads import LanguageModel
from dschat.models.long_rows import num_positions
from dschat.models.packing.states import run_by_row
from dschat.models.training_engine import attributes_replaced, evaluating, without_adapters
from dschat.startup.performance import avoid_cudnn_attention

logger = logging.getLogger("dschat")

MAX_ROWS, _MAX_TOKENS = 64, 1 << 17
_CACHES = {"cache", "past_key_values", "cache_params"}  # arguments that take transformers' caches


def max_rows(length: int) -> int:
    """Answers that decode together, of up to ``length`` tokens with their prompts."""
    return max(1, min(MAX_ROWS, _MAX_TOKENS // length))


class HuggingFaceGenerator:
    """Generates with ``module``, a causal LM or PEFT's around one, whole on this rank.

    Args:
        stop_ids, num_tokens: see `EngineConfig`.
        self_check: compare a few answers with plain forwards.
        reason: why the engine cannot run the module, for a warning.

    Raises:
        UserError: decoding with a cache fails, or computes other log-probs than a plain forward.
    """

    _plain: LanguageModel | None = None  # None, for the check: log-probs of decoding with a cache

    def __init__(
        self,
        module: nn.Module,
        stop_ids: tuple[int, ...],
        num_tokens: int | None = None,
        self_check: bool = False,
        reason: Exception | None = None,
    ) -> None:
        if reason is not None:
            logger.warning("NO FAST GENERATION: %s; transformers' generate decodes", reason)
        avoid_cudnn_attention()
        self.module, self._base, self._stop_ids = module, without_adapters(module), stop_ids
        run_by_row(self._base)  # its layers' steps compute what their scans do
        self.num_tokens = num_tokens or self._base.config.get_text_config().vocab_size
        self.max_positions = num_positions(self._base.config)  # None: unbounded
        problem: str | None = "it has no cache of transformers' kinds"
        if _CACHES & inspect.signature(self._base.forward).parameters.keys():
            problem = decoding_problem(self, module) if self_check else None
        if problem is not None:
            name = type(self._base).__name__
            raise UserError(f"{name} cannot generate here: {problem}; use another model")
        self._plain = LanguageModel(module, packing="off")
        self._plain.check(self._base.device)

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        """Answer every prompt ``sampling.n`` times; see `Generator`. `UserError` if it cannot."""
        requests = self._requests(prompts, sampling, indices)
        for length in dict.fromkeys(map(len, prompts)):
            alike = [s for r in requests if len(r.ids) == length for s in r.sequences]
            size = max_rows(length + sampling.max_new_tokens)
            for rows in (alike[i : i + size] for i in range(0, len(alike), size)):
                self._decode(rows)
                if self._plain is not None:
                    rows.sort(key=len)
                    pairs = [(s.request.ids, s.answer) for s in rows]
                    plain = plain_logprobs(self._plain, pairs, sampling.temperature)
                    for s, logprobs in zip(rows, plain, strict=True):
                        s.logprobs = logprobs.tolist()
                for i, request in enumerate(requests):
                    if answered is not None and request.sequences[-1] in rows:
                        answered(i, request.rollout())
        return Rollout.joined(request.rollout() for request in requests)

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[int, None, None]:
        """The tokens of one answer, which a thread decodes."""
        row = self._requests([prompt], sampling)[0].sequences[0]
        tokens: SimpleQueue[Any] = SimpleQueue()
        with ThreadPoolExecutor(1) as thread:
            decoding = thread.submit(self._decode, [row], tokens.put)
            decoding.add_done_callback(tokens.put)
            try:
                while (token := tokens.get()) is not decoding:
                    yield token
                decoding.result()  # raises what it raised
            finally:
                row.stopped = True

    def _requests(
        self, prompts: list[list[int]], sampling: SamplingParams, indices: list[int] | None = None
    ) -> list[Request]:
        for i, prompt in enumerate(prompts):
            if (fault := prompt_problem(i, prompt)) is not None:
                raise UserError(fault)
            if self.max_positions and len(prompt) + sampling.max_new_tokens > self.max_positions:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens; with max_new_tokens "
                    f"{sampling.max_new_tokens} that exceeds the model's {self.max_positions} "
                    "positions"
                )
        numbered = zip(prompts, indices or range(len(prompts)), strict=True)
        return [Request(list(ids), sampling, number) for ids, number in numbered]

    def _decode(self, rows: list[Sequence], drawn: Callable[[int], None] | None = None) -> None:
        """Answer ``rows``, whose prompts are of one length. ``drawn``: see `_Draws`."""
        sampling, device = rows[0].request.sampling, self._base.device
        ids = torch.tensor([s.request.ids for s in rows], device=device)
        keys = torch.tensor([[[s.request.number, s.sample]] for s in rows], device=device)
        positions = torch.arange(sampling.max_new_tokens, device=device)
        numbers = uniforms(sampling.seed, keys[..., 0], keys[..., 1], positions)
        ends = sampling.known_ends(self._stop_ids, self.num_tokens)
        draws = _Draws(rows, numbers, ends, self.num_tokens, drawn)
        # NOTE: what a config leaves open, `generate` takes from the model's own.
        config = GenerationConfig(max_new_tokens=sampling.max_new_tokens)
        with evaluating(self.module), attributes_replaced(self._base, generation_config=config):
            self._base.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=[draws],
                stopping_criteria=[draws.stopped],
                synced_gpus=False,  # a rank's steps are its own, under ZeRO-3 too
            )


@dataclass
class _Draws(LogitsProcessor):
    """Draws a token for each of ``rows``, and leaves `generate` no other."""

    rows: list[Sequence]  # R
    uniforms: Tensor  # (R, A)
    ends: list[int]  # see `SamplingParams.known_ends`
    num_tokens: int
    drawn: Callable[[int], None] | None  # called with each token of the first row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        request, forbidden = self.rows[0].request, None
        sampling, position = request.sampling, input_ids.shape[1] - len(request.ids)
        if position < sampling.min_new_tokens:
            ends = torch.tensor(self.ends, dtype=torch.int64, device=scores.device)
            forbidden = torch.ones_like(scores[:, 0], dtype=torch.bool), ends
        uniform = self.uniforms[:, position]
        tokens, logprobs = sample(scores, sampling, uniform, forbidden, self.num_tokens)
        for s, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not s.stopped:
                s.answer.append(token)
                s.logprobs.append(logprob)
                s.stopped = token in self.ends
        if self.drawn is not None:
            self.drawn(self.rows[0].answer[-1])
        return scores.fill_(-torch.inf).scatter_(1, tokens.unsqueeze(1), 0.0)

    def stopped(self, input_ids: Tensor, scores: object) -> Tensor:
        return torch.tensor([s.stopped for s in self.rows], device=input_ids.device)


def module_engine(
    module: nn.Module, sizes: EngineConfig, is_checked: bool = False
) -> InferenceEngine:
    """An engine on ``module``, whose weights must be `ModuleWeights.in_use` while the engine runs.

    ``is_checked``: its family has been held against plain forwards before.

    Raises:
        UnsupportedModel: the module cannot run so, or its log-probs differ from its own.
    """
    weight, config = next(module.parameters()), without_adapters(module).config
    engine = InferenceEngine(config, weight.dtype, weight.device, sizes, module=module)
    if not is_checked:
        problem = decoding_problem(engine, module, engine.weights.in_use(), engine.spec.windows)
        if problem is not None:
            raise UnsupportedModel(f"{type(module).__name__} in the engine: {problem}")
    engine.stats = GenerationStats()
    return engine


def module_generator(
    module: nn.Module, sizes: EngineConfig, is_checked: bool = False, in_engine: bool = True
) -> InferenceEngine | HuggingFaceGenerator:
    """`module_engine`; or the fallback, for families that it cannot run or if not ``in_engine``."""
    reason = None
    if in_engine:
        try:
            return module_engine(module, sizes, is_checked)
        except UnsupportedModel as error:
            reason = error
    return HuggingFaceGenerator(module, sizes.stop_ids, sizes.num_tokens, not is_checked, reason)
