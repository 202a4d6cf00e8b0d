"""Defines what a scheduler works on: prompts, their samples, and the work of one step."""

from dataclasses import dataclass, field

from dschat.inference.model.prefix_index import Key


@dataclass(eq=False)
class Prompt:
    """A prompt and its pending samples."""

    ids: list[int]
    number: int  # its index in the whole rollout, on which random numbers depend
    num_samples: int
    max_new_tokens: int
    # Of an answer that continues an earlier turn: its random numbers follow on from there.
    first_sample: int = 0
    first_position: int = 0


@dataclass(eq=False)
class Sequence:
    """One sample of a prompt: the answer so far and its pages.

    ``twins``: other samples with the same answer so far. They have no pages: what this one computes
    is theirs too, and they draw from the same row of logits.
    """

    prompt: Prompt
    sample: int
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    draft: list[int] = field(default_factory=list)  # of the next positions, for one step
    uniforms: list[float] = field(default_factory=list)  # of the answer's next positions
    next_key: Key | None = None  # of the first page that it computes itself
    twins: list["Sequence"] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.answer)

    @property
    def row(self) -> list["Sequence"]:
        """The sequences that draw from its row: itself and its twins."""
        return [self, *self.twins]

    def tokens(self, first: int, last: int) -> list[int]:
        ids, num_ids = self.prompt.ids, len(self.prompt.ids)
        if first >= num_ids:
            return self.answer[first - num_ids : last - num_ids]
        return ids[first:last] + self.answer[: max(0, last - num_ids)]


@dataclass
class StepSchedule:
    """The sequences of one step: each decode computes one token, each chunk a number of tokens, and
    those whose tokens are all computed then their drafts.
    """

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]

    @property
    def ready(self) -> list[Sequence]:
        """Sequences whose tokens are all computed after the step, in row order: each draws one, and
        one more for each token of its draft.
        """
        return self.decodes + [s for s, count in self.chunks if s.computed + count == len(s)]

    def sort_chunks(self) -> None:
        """Whole prompts first, longest first; then by prefix: they attend as padded batches."""
        self.chunks.sort(key=lambda item: (item[0].computed, -item[1] - len(item[0].draft)))

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, without drafts."""
        return len(self.decodes) + sum(count for _, count in self.chunks)


Event = tuple[Sequence, int, bool]  # a token drawn, and whether it is the sequence's last one
