"""Generates with a Hugging Face module, for architectures that the inference engine does not know.

The module is the one in training (ZeRO 0-2: its weights are whole on every rank) or a copy filled
from a weight stream (ZeRO-3).

Prompts are padded on the right and answers start in the next column, so a row has a gap that its
attention mask hides; positions are explicit, and no row begins with padding. A prompt is computed
once for all its samples. Architectures without explicit positions, with a local window over columns
or with a cache other than plain attention over all tokens get batches of prompts of one length,
without gaps. A self-check detects other architectures that cannot decode like this.
"""

import inspect
import logging
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.inference.protocol import (
    Answered,
    FinishReason,
    Rollout,
    SamplingParams,
    prompt_problem,
)
from dschat.inference.sampling import sample, uniforms
from dschat.inference.self_check import gap_to_plain, tolerance
from dschat.memory import free_bytes
from dschat.models.row_length import num_positions
from dschat.models.training_engine import evaluating, without_adapters
from dschat.startup.performance import avoid_cudnn_attention

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("dschat")

# Config fields for the size of a local attention window (sliding_window, GPT-Neo's window_size).
_WINDOW = re.compile(r"(?:^|_)(?:window|window_size|attention_chunk_size)$")
# The argument of a model's forward that takes its cache: named as in what the forward returns.
_CACHE = next(f.name for f in fields(CausalLMOutputWithPast) if "Cache" in str(f.type))
MAX_ROWS = 256  # that decode together
_CHECKED_TOKENS = 8  # per answer of the self-check


@dataclass
class Batching:
    """How an architecture's rows are batched; the self-check turns off what gives wrong results."""

    with_gaps: bool  # batch prompts of several lengths, with gaps after the shorter ones
    copies_cache: bool  # compute a prompt once for all its samples; remove finished rows
    unchecked: bool  # the self-check is still to run


class HuggingFaceGenerator:
    """Generates with ``module``, a causal LM whose weights are whole on this rank.

    Args:
        stop_ids: tokens that end an answer.
        max_num_seqs: maximum number of rows that decode together.
        num_tokens: size of the tokenizer; ids from it on, for which a head may have rows, are
            never drawn.
        self_check: compare a few answers of the first rollout with plain forwards, see `generate`.
    """

    def __init__(
        self,
        module: "PreTrainedModel | PeftModel",
        stop_ids: tuple[int, ...],
        pad_id: int,
        max_num_seqs: int = MAX_ROWS,
        num_tokens: int | None = None,
        self_check: bool = False,
    ) -> None:
        avoid_cudnn_attention()
        self.module = module
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._max_num_seqs = max_num_seqs
        self._num_tokens = num_tokens
        base = without_adapters(module)
        self._config, self._name = base.config, type(base).__name__
        parameters = inspect.signature(base.forward).parameters
        supports_default = getattr(base, "_supports_default_dynamic_cache", lambda: True)()
        self._makes_cache = _CACHE not in parameters or not supports_default
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        try:
            layers = DynamicCache(config=base.config).layers
        except (AttributeError, KeyError) as error:  # BLT
            raise self._unable(f"transformers has no cache for its config ({error})") from None
        self._plain = all(type(layer) is DynamicLayer for layer in layers)
        settings = base.config.get_text_config().to_dict().items()
        local = any(value and _WINDOW.search(key) for key, value in settings)
        with_gaps = self._plain and self._takes_positions and not local
        # MiniMax keeps state beside the layers of its own cache, where no copy of rows reaches it.
        self.batching = Batching(with_gaps, copies_cache=supports_default, unchecked=self_check)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

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
            UserError: a prompt that cannot be answered; or, by the self-check, decoding with a
                cache that fails, or whose log-probs differ from those of a plain forward.
        """
        indices = list(range(len(prompts))) if indices is None else indices
        self._check(prompts, sampling)
        if self.batching.unchecked and prompts:
            try:
                self._check_itself(prompts, sampling.max_new_tokens)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
                    raise
                raise self._unable(f"its cache fails ({first_line(error)})") from error
        return self._generate(prompts, sampling, indices, answered)

    def _generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int],
        answered: Answered | None = None,
    ) -> Rollout:
        end_ids = sampling.end_ids(self._stop_ids)
        answers: dict[int, Rollout] = {}  # by prompt
        with evaluating(self.module):
            for batch in self._batches(prompts, sampling.n):
                rows = [(p, s) for p in batch for s in range(sampling.n)]
                ids: list[list[int]] = [[] for _ in rows]
                logprobs: list[list[float]] = [[] for _ in rows]
                for live, tokens, values in self._decode(prompts, batch, indices, sampling):
                    for row, token, value in zip(live, tokens, values, strict=True):
                        ids[row].append(token)
                        logprobs[row].append(value)
                ends: list[FinishReason] = ["stop" if r[-1] in end_ids else "length" for r in ids]
                drawn = Rollout(ids, logprobs, ends)
                for i, p in enumerate(batch):
                    answers[p] = drawn.part(i * sampling.n, (i + 1) * sampling.n)
                    if answered is not None:
                        answered(p, answers[p])
        return Rollout.joined(answers[p] for p in range(len(prompts)))

    @torch.no_grad()
    def stream(self, prompt: list[int], sampling: SamplingParams) -> Generator[int, None, None]:
        """The tokens of one answer as they are decoded."""
        self._check([prompt], sampling)
        with evaluating(self.module):
            for _, tokens, _ in self._decode([prompt], [0], [0], sampling):
                yield tokens[0]

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

    def _check_itself(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Compare two samples each of a long and a short prompt with plain forwards of the module.

        If they differ, only prompts of one length decode together from then on, every sample
        computes its prompt, and finished rows stay. This is also right for state outside the cache.
        """
        self.batching.unchecked = False
        long, short = max(prompts, key=len), min(prompts, key=len)
        if len(short) == len(long):
            short = long[: (len(long) + 1) // 2]
        sampling = SamplingParams(min(_CHECKED_TOKENS, max_new_tokens), n=2, ignore_eos=True)
        rounding = tolerance(self.module)
        error = self._error([long, short], sampling)
        if error <= rounding:
            return
        self.batching.with_gaps = self.batching.copies_cache = False
        error_unshared = self._error([long, short], sampling)
        if not error_unshared <= rounding:
            raise UserError(
                f"{self._name} cannot generate here: log-probs of cached decoding differ by "
                f"{error_unshared:.2g} nats from those that training computes; use another model"
            )
        logger.warning(
            "SLOWER GENERATION: %s's log-probs differ by %.2g nats if sequences share a cache; "
            "decoding only prompts of one length together, each sample with its own prefill",
            *(self._name, error),
        )

    def _error(self, prompts: list[list[int]], sampling: SamplingParams) -> float:
        """`gap_to_plain` of answers to ``prompts``."""
        rollout = self._generate(prompts, sampling, list(range(len(prompts))))
        return gap_to_plain(self.module, prompts, rollout, sampling.n)

    def _batches(self, prompts: list[list[int]], samples: int) -> Iterator[list[int]]:
        """Prompts that decode together, longest first; of one length unless gaps are allowed."""
        size = max(1, self._max_num_seqs // samples)
        batch: list[int] = []
        for p in sorted(range(len(prompts)), key=lambda p: -len(prompts[p])):
            same_length = not batch or len(prompts[batch[0]]) == len(prompts[p])
            if batch and (len(batch) == size or not (same_length or self.batching.with_gaps)):
                yield batch
                batch = []
            batch.append(p)
        if batch:
            yield batch

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, str, Cache]:
        """Logits after each prompt (B, V), and the cache of the whole right-padded block behind the
        name that the forward has for it.
        """
        lengths = torch.tensor([len(p) for p in prompts])
        longest = int(lengths.max())
        ids = torch.full((len(prompts), longest), self._pad_id)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        if not self.batching.copies_cache:
            # NOTE: RecurrentGemma keeps state in its layers and treats a prompt of one token as a
            # decode step; a forward without cache clears that state.
            self.module(input_ids=ids[:1, :1].to(self.device), use_cache=False)
        last, options = lengths - 1, {}
        if not self._makes_cache:
            # Without a config it grows by itself: HRM runs its layers several times per token.
            options[_CACHE] = DynamicCache(config=None if self._plain else self._config)
        if self._takes_positions:
            options["position_ids"] = torch.arange(longest, device=self.device).expand(ids.shape)
        if self._keeps_logits:  # only the columns where some prompt ends
            columns, last = torch.unique(last, return_inverse=True)
            options["logits_to_keep"] = columns.to(self.device)
        output = self.module(input_ids=ids.to(self.device), use_cache=True, **options)
        made = {**output, **options}.items()
        name, cache = next(((n, c) for n, c in made if isinstance(c, Cache)), ("", None))
        if cache is None:
            raise self._unable("it has no cache of transformers' kinds")
        rows = torch.arange(len(prompts), device=self.device)
        return output.logits[rows, last.to(self.device)], name, cache

    def _decode(
        self,
        prompts: list[list[int]],
        batch: list[int],
        indices: list[int],
        sampling: SamplingParams,
    ) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Yields per step: unfinished rows (prompt-major in ``batch``), tokens and log-probs."""
        n, device = sampling.n, self.device
        copies = 1 if self.batching.copies_cache else n
        logits, name, cache = self._prefill([prompts[p] for p in batch for _ in range(copies)])
        lengths = torch.tensor([len(prompts[p]) for p in batch], device=device).repeat_interleave(n)
        prompt_index = torch.tensor([indices[p] for p in batch], device=device).repeat_interleave(n)
        sample_index = torch.arange(n, device=device).repeat(len(batch))
        if n > copies:
            logits = logits.repeat_interleave(n, dim=0)
            cache.reorder_cache(torch.arange(len(batch), device=device).repeat_interleave(n))
        longest = int(lengths.max())
        mask = torch.arange(longest, device=device) < lengths.unsqueeze(1)
        has_gaps = bool((lengths != longest).any())
        rows = torch.arange(len(batch) * n, device=device)
        end_ids = sampling.end_ids(self._stop_ids)
        num_tokens = self._num_tokens or logits.shape[-1]
        known = [i for i in sorted(end_ids) if 0 <= i < num_tokens]
        ends = torch.tensor(known, dtype=torch.int64, device=device)
        finished = torch.zeros_like(rows, dtype=torch.bool)
        for position in range(sampling.max_new_tokens):
            uniform = None
            if sampling.temperature > 0:
                here = torch.full_like(prompt_index, position)
                uniform = uniforms(sampling.seed, prompt_index, sample_index, here)
            forbidden = None
            if position < sampling.min_new_tokens:
                forbidden = (torch.ones_like(rows, dtype=torch.bool), ends)
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, num_tokens)
            live = (~finished).nonzero().squeeze(1)
            yield rows[live].tolist(), tokens[live].tolist(), logprobs[live].tolist()
            finished |= torch.isin(tokens, ends)
            if position + 1 == sampling.max_new_tokens or finished.all():
                return
            # Finished rows are removed at once: copying the cache is cheaper than decoding them.
            if finished.any() and self.batching.copies_cache:
                keep = (~finished).nonzero().squeeze(1)
                cache.reorder_cache(keep)
                tokens, rows, lengths, mask = tokens[keep], rows[keep], lengths[keep], mask[keep]
                prompt_index, sample_index = prompt_index[keep], sample_index[keep]
                finished = finished[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            options = {name: cache}
            if self._takes_positions:
                options["position_ids"] = (lengths + position).unsqueeze(1)
            if has_gaps:
                options["attention_mask"] = mask.long()
            output = self.module(input_ids=tokens.unsqueeze(1), use_cache=True, **options)
            logits = output.logits[:, -1]


def fill(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a weight stream into a whole module. Every weight must appear exactly once.

    Raises:
        RuntimeError: a weight is missing, unknown, repeated or of another shape (our invariant).
    """
    targets = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters()}
    seen: set[str] = set()
    for name, tensor in stream:
        if name not in targets:
            raise RuntimeError(f"the weight stream has {name}, which the module does not have")
        if name in seen:
            raise RuntimeError(f"the weight stream has {name} twice")
        target = targets[name]
        if target.shape != tensor.shape:  # NOTE: copy_ would broadcast
            shapes = f"{tuple(tensor.shape)} instead of {tuple(target.shape)}"
            raise RuntimeError(f"the weight stream has {name} in shape {shapes}")
        target.data.copy_(tensor)
        seen.add(name)
        del tensor  # NOTE: it may keep a whole bucket alive while the next one is gathered
    if parameters - seen:
        raise RuntimeError(f"the weight stream lacks {sorted(parameters - seen)[:3]}")


def empty_copy(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """An uninitialized module of ``config``; ``UserError`` with its size if it does not fit."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    free = free_bytes(device)
    if needed > 0.9 * free:
        raise UserError(
            f"a whole copy of the actor for generation takes {needed / 2**30:.1f} GiB per process "
            f"and {free / 2**30:.1f} GiB are free; use a smaller --actor_zero_stage or model"
        )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
