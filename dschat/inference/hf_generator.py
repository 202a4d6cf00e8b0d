"""Generates with transformers' own module: in the engine, or with the module alone.

The engine runs it for families that the architecture table does not have. For those that the engine
cannot run either, `HuggingFaceGenerator` takes one prompt at a time: its samples are rows of one
length, each of which computes the prompt, over the cache that the module makes. Rows that have
ended stay until all have. So nothing is padded, masked or copied, and state of any kind is right,
also outside the cache. Either is first held against plain forwards of the module, without a cache.
"""

import inspect
import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.inference.engine import InferenceEngine
from dschat.inference.engine_config import EngineConfig
from dschat.inference.model.spec import UnsupportedModel
from dschat.inference.model.states import CACHE
from dschat.inference.protocol import Answered, Rollout, SamplingParams, prompt_problem
from dschat.inference.sampling import sample, uniforms
from dschat.inference.stats import GenerationStats
from dschat.losses import token_logprobs
from dschat.models.long_rows import num_positions
from dschat.models.packing.states import run_by_row
from dschat.models.training_engine import evaluating, without_adapters
from dschat.startup.performance import avoid_cudnn_attention

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("dschat")

MAX_ROWS = 64  # samples that decode together

# Largest difference of a sequence's mean log-prob, in nats, that counts as rounding. Observed in
# fp32: 3e-7 to 6e-6 in tiny models of all families, 0.07 to 30 with wrong results; larger models
# round more. In 16 bits a MoE router may choose another expert.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.25
_NEW, _SHORT, _LONG, _LONGEST = 8, 5, 40, 4096  # tokens of an answer, and of the two prompts
_FAILURES = (AttributeError, LookupError, RuntimeError, TypeError)


class HuggingFaceGenerator:
    """Generates with ``module``, a causal LM whose weights are whole on this rank.

    Args:
        stop_ids, num_tokens: see `EngineConfig`.
        self_check: compare a few answers with plain forwards.
        reason: why the engine cannot run the module, for a warning.

    Raises:
        UserError: decoding with a cache fails, or computes other log-probs than a plain forward.
    """

    def __init__(
        self,
        module: "PreTrainedModel | PeftModel",
        stop_ids: tuple[int, ...],
        num_tokens: int | None = None,
        self_check: bool = False,
        reason: Exception | None = None,
    ) -> None:
        if reason is not None:
            logger.warning(
                "NO FAST GENERATION: %s; transformers' module answers one prompt at a time, "
                "several times slower",
                reason,
            )
        avoid_cudnn_attention()
        self.module = module
        self._stop_ids = stop_ids
        base = without_adapters(module)
        self._config, self._name = base.config, type(base).__name__
        run_by_row(base)  # its layers' steps compute what their scans do
        self.num_tokens = num_tokens or self._config.get_text_config().vocab_size
        self._parameters = inspect.signature(base.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        if self_check and (problem := decoding_problem(self, module, nullcontext())) is not None:
            raise self._unable(problem)

    @property
    def max_positions(self) -> int | None:
        """The model's number of positions; None if unbounded."""
        return num_positions(self._config)

    def _unable(self, reason: str) -> UserError:
        return UserError(f"{self._name} cannot generate here: {reason}; use another model")

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        """Answer every prompt ``sampling.n`` times; see `Generator`.

        Raises:
            UserError: a prompt that cannot be answered.
        """
        self._check(prompts, sampling)
        answers = []
        with evaluating(self.module):
            for p, prompt in enumerate(prompts):
                index = p if indices is None else indices[p]
                answers.append(self._answers(prompt, index, sampling))
                if answered is not None:
                    answered(p, answers[p])
        return Rollout.joined(answers)

    def _answers(self, prompt: list[int], index: int, sampling: SamplingParams) -> Rollout:
        rollout, end_ids = Rollout(), sampling.end_ids(self._stop_ids)
        for first in range(0, sampling.n, MAX_ROWS):
            samples = range(first, min(first + MAX_ROWS, sampling.n))
            steps = list(self._decode(prompt, index, samples, sampling))
            for row in range(len(samples)):
                tokens = [tokens[row] for tokens, _ in steps]
                count = next((i for i, t in enumerate(tokens, 1) if t in end_ids), len(tokens))
                rollout.token_ids.append(tokens[:count])
                rollout.logprobs.append([logprobs[row] for _, logprobs in steps[:count]])
                ends = tokens[count - 1] in end_ids
                rollout.finish_reasons.append("stop" if ends else "length")
        return rollout

    @torch.no_grad()
    def stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[int, None, None]:
        """The tokens of one answer as they are decoded."""
        self._check([prompt], sampling)
        with evaluating(self.module):
            for (token,), _ in self._decode(prompt, 0, range(1), sampling):
                yield token

    def _check(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        for i, prompt in enumerate(prompts):
            if (fault := prompt_problem(i, prompt)) is not None:
                raise UserError(fault)
            if self.max_positions and len(prompt) + sampling.max_new_tokens > self.max_positions:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens; with max_new_tokens "
                    f"{sampling.max_new_tokens} that exceeds the model's {self.max_positions} "
                    "positions"
                )

    def _decode(
        self, prompt: list[int], index: int, samples: range, sampling: SamplingParams
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Yields per step the token of each of ``samples`` and its log-prob, until all have ended;
        of those that have, any.
        """
        device = next(self.module.parameters()).device
        ids = torch.tensor([prompt] * len(samples), device=device)
        sample_index = torch.arange(samples.start, samples.stop, device=device)
        prompt_index = torch.full_like(sample_index, index)
        finished = torch.zeros_like(sample_index, dtype=torch.bool)
        known = sampling.known_ends(self._stop_ids, self.num_tokens)
        ends = torch.tensor(known, dtype=torch.int64, device=device)
        cache: dict[str, Any] = {}
        for position in range(sampling.max_new_tokens):
            start = len(prompt) + position - 1 if cache else 0
            logits, cache = self._forward(ids, start, cache)
            uniform = forbidden = None
            if sampling.temperature > 0:
                here = torch.full_like(prompt_index, position)
                uniform = uniforms(sampling.seed, prompt_index, sample_index, here)
            if position < sampling.min_new_tokens:
                forbidden = (torch.ones_like(finished), ends)
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, self.num_tokens)
            yield tokens.tolist(), logprobs.tolist()
            finished |= torch.isin(tokens, ends)
            if finished.all():
                return
            ids = tokens.unsqueeze(1)

    def _forward(
        self, ids: Tensor, start: int, cache: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits after ``ids`` (B, T), which begin at position ``start``; and the cache, under the
        name of the argument that takes it.
        """
        options = {"input_ids": ids, "use_cache": True, **self._options}
        if "position_ids" in self._parameters:
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)
            options["position_ids"] = positions.expand(ids.shape)
        output = self.module(**options, **cache)
        if not cache:
            cache = {name: value for name, value in output.items() if isinstance(value, Cache)}
        if not cache and CACHE not in self._parameters:
            raise self._unable("it has no cache of transformers' kinds")
        if not cache:
            # RecurrentGemma returns no cache, but fills one that it is given. A forward without
            # clears the states in its layers.
            self.module(input_ids=ids[:1, :1], use_cache=False)
            cache = {CACHE: DynamicCache(config=self._config)}
            output = self.module(**options, **cache)
        return output.logits[:, -1], cache


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
        problem = decoding_problem(engine, module, engine.weights.in_use(), engine.spec.windows)
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


# -- check -----------------------------------------------------------------------------------------


def decoding_problem(
    generator: InferenceEngine | HuggingFaceGenerator,
    module: nn.Module,
    scope: AbstractContextManager[None],
    windows: Iterable[int | None] = (),
) -> str | None:
    """One line that says why ``generator`` does not compute what ``module`` does; None if it does.

    Compares two answers each to a random prompt that is longer than all ``windows`` and a short
    one. ``scope``: the generator runs in it, and the plain forward does not.
    """
    positions = generator.max_positions or 64
    new = max(1, min(_NEW, positions // 2))
    longest = max([_LONG, *(2 + window for window in windows if window)])
    longest = max(1, min(longest, _LONGEST, positions - new))
    draw = torch.Generator().manual_seed(0)
    shapes = (longest,), (min(_SHORT, longest),)
    num_ids = generator.num_tokens
    prompts = [torch.randint(num_ids, shape, generator=draw).tolist() for shape in shapes]
    try:
        with scope:
            rollout = generator.generate(prompts, SamplingParams(new, n=2, ignore_eos=True))
    except _FAILURES as error:
        if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
            raise
        return f"its cache fails ({first_line(error)})"
    gap = _gap_to_plain(module, prompts, rollout, 2)
    if gap <= _TOLERANCE.get(next(module.parameters()).dtype, _TOLERANCE_16_BIT):
        return None
    return f"with its cache log-probs differ by {gap:.2g} nats from those that training computes"


@torch.no_grad()
def _gap_to_plain(module: nn.Module, prompts: list[list[int]], rollout: Rollout, n: int) -> float:
    """The largest mean, over an answer, of |its log-prob - that of a plain forward|; inf for NaN.

    ``rollout``: ``n`` answers of equal length to each of ``prompts``.
    """
    device, gaps = next(module.parameters()).device, []
    with evaluating(module):
        for p, prompt in enumerate(prompts):
            answers = rollout.token_ids[p * n : (p + 1) * n]
            ids = torch.tensor([prompt + answer for answer in answers], device=device)
            logits = module(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            plain = token_logprobs(logits, ids[:, len(prompt) :]).cpu()
            drawn = torch.tensor(rollout.logprobs[p * n : (p + 1) * n])
            gaps.append((drawn - plain).abs().mean(1))
    return float(torch.cat(gaps).nan_to_num(nan=torch.inf).max())
