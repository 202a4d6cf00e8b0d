"""Defines `Experience`, what rollout and scoring hand to the learner, and its token alignment.

A sequence is prompt + answer, padded on the right. With p prompt tokens, action j (0-based) is the
token in column p + j; the hidden state of column p + j - 1 predicts it, and the critic's score
there is the value before it. All (S, A) tensors are indexed by action, not by column, so answers
are aligned on the left. In an episode of several turns the environment's tokens between two answers
have places too, at which the mask is False. Masks come from lengths and from the rollout, because
pad may equal EOS. Only `Experience.take` does this arithmetic.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import dschat.distributed as dist
from dschat.data.sources.adapters import Content
from dschat.inference.protocol import Rollout
from dschat.models.packing import PackedRows, pack
from dschat.models.packing.varlen import to_device


@dataclass
class Experience:
    """S sequences of this rank, T columns, at most A actions each. Kept on the CPU.

    ``numbers`` index the sequences of the whole rollout over all ranks: the n samples of prompt k
    are k n, ..., k n + n - 1. Some may be missing, and a rank may hold any of them, in ascending
    order. The rows of an agent's episode are neighbours with one number, on one rank.
    """

    input_ids: Tensor  # (S, T) int64, prompt + answer, right-padded
    lengths: Tensor  # (S,) int64, prompt + answer tokens
    prompt_lengths: Tensor  # (S,) int64
    numbers: Tensor  # (S,) int64
    answer_mask: Tensor  # (S, A) bool, True where the model drew the token (EOS is one)
    loss_mask: Tensor  # (S, A) bool, the actions that the actor learns from
    finished: Tensor  # (S,) bool, whether the answer ended with a stop token
    rollout_logprobs: Tensor  # (S, A) fp32, the generator's
    logprobs: Tensor  # (S, A) fp32, the actor's, by the training form or the generator
    recomputed: Tensor  # (S,) bool, whether the training form computed logprobs and entropy
    ref_logprobs: Tensor  # (S, A) fp32, the reference model's
    teacher_logprobs: Tensor  # (S, A) fp32, the teacher's
    candidates: Tensor  # (S, A, K) int64, likely ids of teacher and actor; K = 0: not computed
    teacher_candidates: Tensor  # (S, A, K) fp32, the teacher's log-probs of the candidates
    values: Tensor  # (S, A) fp32, the critic's, before each action
    scores: Tensor  # (S,) fp32, weighted sum of all sources, not clipped or penalized
    scored: Tensor  # (S,) bool, False where every source declined; then score and advantages are 0
    token_scores: Tensor  # (S, A) fp32, the part of the scores given to single actions
    entropy: Tensor  # (S, A) fp32, of the actor's distribution at each action, in nats
    weights: Tensor  # (S, A) fp32, importance weights against the generator's distribution
    advantages: Tensor  # (S, A) fp32
    returns: Tensor  # (S, A) fp32
    sources: list[Content | None] | None = None  # (S,) text or messages of the prompts, where known
    source_scores: list[dict[str, float]] | None = None  # (S,) of weighted sources, as they came
    columns: list[dict[str, Any]] | None = None  # (S,) of the rows, for --teacher_prompt
    inputs: list[dict[str, Any]] | None = None  # (S,) what their chat template got beside them
    places: list[int] | None = None  # (S,) the prompts' rows in the table, where known
    # (S,) of (T, routers, k): the experts that the rollout chose, if training replays them
    experts: list[Tensor] | None = None
    rows: PackedRows | None = None  # of a micro-batch: the forwards' input, reading every action
    num_prompts: int = 0  # of the whole rollout, over all ranks
    num_mini_batches: int = 1  # optimizer steps of an epoch, the same on all ranks
    together: int = 1  # sequences, consecutive by number, that are in one mini-batch
    problem: str = ""  # why the update must be skipped, the same on all ranks; "" if it need not
    metrics: dict[str, float] = field(default_factory=dict)  # of its generation and scoring

    def __repr__(self) -> str:
        """In a few lines what its tensors, which fill the screen, amount to."""
        kl = ((self.logprobs - self.ref_logprobs) * self.answer_mask).sum(dim=1)
        rows = {"prompt tokens": self.prompt_lengths, "answer tokens": self.answer_mask.sum(dim=1)}
        rows |= {"finished": self.finished, "scores": self.scores[self.scored], "KL to ref": kl}
        rows |= {name: getattr(self, name)[self.scored_mask] for name in ("advantages", "returns")}
        steps = f"steps of an epoch: {self.num_mini_batches}"
        lines = [f"Experience: {self.num_sequences} sequences, {self.problem or steps}"]
        for name, of in rows.items():
            if len(of := of.double()):
                low, high = of.aminmax()
                lines.append(f"  {name:<13} mean {of.mean():9.4g} from {low:9.4g} to {high:9.4g}")
        return "\n".join(lines)

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def first_rows(self) -> Tensor:
        """The first row of every episode: (S,) bool; of single answers all."""
        return torch.diff(self.numbers, prepend=self.numbers[:1] - 1) != 0

    @property
    def rows_of_episodes(self) -> list[int]:
        """How many rows each episode has."""
        return self.numbers.unique_consecutive(return_counts=True)[1].tolist()

    def episode_means(self, values: Tensor, total: bool = False) -> Tensor:
        """The mean, or the ``total``, of ``values`` (S,) over the rows of each episode, for each of
        its rows.
        """
        if self.first_rows.all():
            return values
        episode = self.first_rows.cumsum(0) - 1
        count = torch.bincount(episode)
        sums = torch.zeros(len(count), dtype=torch.float64).index_add_(0, episode, values.double())
        return (sums if total else sums / count)[episode].to(values.dtype)

    @property
    def scored_mask(self) -> Tensor:
        """Actions of the answers that have a score: (S, A) bool."""
        return self.answer_mask & self.scored.unsqueeze(1)

    def by_source(self, names: Iterable[str]) -> Tensor:
        """The scores of these sources: (S, K) fp32, NaN where one declined."""
        names = list(names)
        rows = [[row.get(name, math.nan) for name in names] for row in self.source_scores or ()]
        return torch.tensor(rows, dtype=torch.float32).view(self.num_sequences, len(names))

    def cut_into(self, num_mini_batches: int, samples: int) -> None:
        """Plan an epoch's optimizer steps, the same on all ranks. One step has all answers to a
        prompt, which it then computes once; but not where a rank would have no answers in a step.
        """
        self.num_mini_batches = num_mini_batches
        if self.num_prompts % (num_mini_batches * dist.world_size()) == 0:
            self.together = samples

    def take(self, rows: list[int], device: torch.device) -> "Experience":
        """A micro-batch of these rows on ``device``, trimmed to the longest and packed.

        Without rows it has one sequence, which is masked.
        """
        part = self.pick_or_dummy(rows)
        ends = part.lengths.tolist()
        sequences = [ids[:end].numpy() for ids, end in zip(part.input_ids, ends, strict=True)]
        starts = part.prompt_lengths.tolist()
        masks = zip(starts, part.answer_mask, strict=True)
        reads = [start - 1 + mask.nonzero().flatten().numpy() for start, mask in masks]
        part.rows = pack(sequences, reads, starts, part.experts)
        part.experts = None
        if part.candidates.shape[-1]:
            part.rows.candidates = part.candidates[part.answer_mask]
        return part.to(device)

    def by_action(self, values: Tensor) -> Tensor:
        """What a forward read of ``rows``, (M,) or (M, K), as (S, A) or (S, A, K): 0 where there is
        no action.
        """
        zeros = values.new_zeros(self.answer_mask.shape + values.shape[1:])
        mask = self.answer_mask.view(self.answer_mask.shape + (1,) * (values.dim() - 1))
        return zeros.masked_scatter(mask, values)

    def pick(self, rows: list[int]) -> "Experience":
        """These rows, columns trimmed to the longest."""
        index = torch.tensor(rows, dtype=torch.int64)
        longest = int(self.lengths[index].max()) if rows else 0
        actions = max(1, int((self.lengths - self.prompt_lengths)[index].max())) if rows else 0

        def picked(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [value[row] for row in rows]
            if not isinstance(value, Tensor):
                return None if isinstance(value, PackedRows) else value
            value = value[index]
            if value.dim() >= 2:
                value = value[:, : longest if name == "input_ids" else actions]
            return value

        return Experience(**{f.name: picked(f.name, getattr(self, f.name)) for f in fields(self)})

    def pick_or_dummy(self, rows: list[int]) -> "Experience":
        """These rows; without any, one sequence that is masked."""
        if rows:
            return self.pick(rows)
        shape = 1, 1, self.candidates.shape[-1]
        candidates, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        return replace(_dummy(), candidates=candidates, teacher_candidates=logprobs)

    def to(self, device: torch.device) -> "Experience":
        return to_device(self, device)


def joined(parts: list[Experience]) -> Experience:
    """Concatenate the rows of ``parts`` (at least one), in order; padding ids are 0. It has no
    metrics.
    """
    parts = [part for part in parts if part.num_sequences] or parts[:1]

    def concatenated(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], Tensor):
            if values[0].dim() == 1:
                return torch.cat(values)
            width = max(value.shape[1] for value in values)
            inner = (0, 0) * (values[0].dim() - 2)
            return torch.cat([F.pad(v, (*inner, 0, width - v.shape[1])) for v in values])
        if isinstance(values[0], (int, str)):
            return max(values)  # a problem, if any part has one
        if isinstance(values[0], dict):
            return {}
        if any(value is None or isinstance(value, PackedRows) for value in values):
            return None
        return [row for value in values for row in value]

    return Experience(**{f.name: concatenated(f.name) for f in fields(Experience)})


# Per-action fields that are 0 until scoring fills them in.
_PER_ACTION = (
    "logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "values",
    "token_scores",
    "entropy",
    "advantages",
    "returns",
)


def _dummy() -> Experience:
    """One sequence without actions: a rank without rows must run as many forwards as the others."""
    return from_rollout([[0]], Rollout([[0]], [[0.0]], ["length"], drawn=[[False]]), pad_id=0)


def from_rollout(
    prompts: list[list[int]],
    rollout: Rollout,
    pad_id: int,
    first_index: int = 0,
) -> Experience:
    """An experience from ``rollout``; scores, log-probs and values are still 0, weights 1.

    ``prompts`` has one entry per sequence of ``rollout``: a prompt is repeated for each of its
    samples. The first sequence has number ``first_index``.
    """
    sequences = [p + a for p, a in zip(prompts, rollout.token_ids, strict=True)]
    if not sequences:
        return _dummy().pick([])
    ids = pad_sequence([torch.tensor(row) for row in sequences], True, pad_id)
    num_actions = torch.tensor([len(a) for a in rollout.token_ids])
    width = int(num_actions.max())
    places = torch.arange(width) < num_actions.unsqueeze(1)
    mask = places.clone()
    if rollout.drawn is not None:
        mask[places] = torch.tensor([value for row in rollout.drawn for value in row])
    logprobs = torch.zeros(len(sequences), width)
    logprobs[places] = torch.tensor([value for row in rollout.logprobs for value in row])
    per_action: dict[str, Any] = {name: torch.zeros_like(logprobs) for name in _PER_ACTION}
    return Experience(
        input_ids=ids,
        lengths=torch.tensor([len(s) for s in sequences]),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        numbers=torch.arange(first_index, first_index + len(sequences)),
        answer_mask=mask,
        loss_mask=mask.clone(),
        finished=torch.tensor([reason == "stop" for reason in rollout.finish_reasons]),
        rollout_logprobs=logprobs,
        candidates=torch.zeros(*logprobs.shape, 0, dtype=torch.int64),
        teacher_candidates=torch.zeros(*logprobs.shape, 0),
        scores=torch.zeros(len(sequences)),
        scored=torch.ones(len(sequences), dtype=torch.bool),
        recomputed=torch.zeros(len(sequences), dtype=torch.bool),
        weights=mask.float(),
        experts=rollout.experts,
        **per_action,
    )


def mini_batch_of(
    numbers: Tensor, num_mini_batches: int, seed: list[int], together: int = 1
) -> np.ndarray:
    """Assign each sequence to a mini-batch by its number in the rollout: (S,) int64 -> (S,) int64.

    The rollout is split into blocks of ``num_mini_batches`` consecutive units, of ``together``
    sequences each; a permutation drawn per block gives one unit to every mini-batch. So the
    assignment does not depend on the number of ranks, and a rank that holds whole blocks has an
    equal share of every mini-batch.
    """
    blocks, places = np.divmod(numbers.numpy() // together, num_mini_batches)
    permutations = {
        block: np.random.default_rng([*seed, int(block)]).permutation(num_mini_batches)
        for block in np.unique(blocks)
    }
    return np.array(
        [permutations[b][p] for b, p in zip(blocks, places, strict=True)], dtype=np.int64
    )
