"""Continuous batching: which sequences bring which tokens to the next step.

Prompts come in; plans of steps go out, and the tokens that were drawn come back. Page numbers are
its currency; it must not know tensors, weights or how tokens are drawn. It looks at nothing but
lengths and tokens, so the ranks of a tensor-parallel group all make the same plan.

A sequence's tokens are prompt + answer; `computed` of them have keys and values in the cache. To
advance it, the rest is computed and a token is drawn: usually one (decode), at first the whole
prompt (prefill), after a preemption everything again. Samples of one prompt share its pages; the
page that a prompt ends in is copied, for what follows differs.
"""

from collections import deque
from dataclasses import dataclass, field

from dschat.inference.model.kv_cache import KVCache


@dataclass(eq=False)
class Prompt:
    """One prompt and its samples."""

    ids: list[int]
    number: int  # in the whole rollout: random numbers depend on it
    num_samples: int
    max_new_tokens: int
    pages: list[int] = field(default_factory=list)  # held while samples wait to share them
    waiting: int = 0  # samples that do


@dataclass(eq=False)
class Sequence:
    """One answer in the making."""

    prompt: Prompt
    sample: int
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    uniforms: list[float] = field(default_factory=list)  # of the answer's next positions
    forked: bool = False  # waits to share its prompt's pages

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.answer)

    def tokens(self, first: int, last: int) -> list[int]:
        ids, num_ids = self.prompt.ids, len(self.prompt.ids)
        if first >= num_ids:
            return self.answer[first - num_ids : last - num_ids]
        return ids[first:last] + self.answer[: max(0, last - num_ids)]


@dataclass
class StepSchedule:
    """The sequences of one step, and how many tokens each brings: decodes one, chunks the rest."""

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]

    @property
    def ready(self) -> list[Sequence]:
        """Sequences that are complete after the step, in the order of its rows: each draws."""
        return self.decodes + [s for s, count in self.chunks if s.computed + count == len(s)]


class Scheduler:
    """``max_num_seqs`` sequences have pages at a time; a step computes ``max_num_batched_tokens``.

    Statistics: ``preemptions``, ``peak_pages``.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.peak_pages = 0

    def add(self, prompts: list[Prompt]) -> None:
        """Queue the first sample of each prompt, the longest prompt first."""
        for prompt in sorted(prompts, key=lambda p: -len(p.ids)):
            self._waiting.append(Sequence(prompt, 0))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    # -- planning ----------------------------------------------------------------------------------

    def schedule(self) -> StepSchedule:
        """What the next step computes. Every sequence in it has pages for its new tokens."""
        size = self._cache.page_size
        for sequence in list(self._running):
            # One without pages: an older one has preempted it just now.
            if sequence.pages and len(sequence) > size * len(sequence.pages):
                self._grow(sequence)
        self._admit()
        self._compact()
        used = self._cache.num_pages - self._cache.num_free
        self.peak_pages = max(self.peak_pages, used)
        decodes = [s for s in self._running if len(s) - s.computed == 1]
        decodes.sort(key=lambda s: s.pages[0])
        budget = max(1, self._max_num_batched_tokens - len(decodes))
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            rest = len(sequence) - sequence.computed
            if rest > 1 and budget > 0:
                chunks.append((sequence, min(rest, budget)))
                budget -= chunks[-1][1]
        assert decodes or chunks, "nothing can run: the cache is too small for any sequence"
        # Whole prompts first, the longest in front: they attend together, padded.
        chunks.sort(key=lambda item: (item[0].computed > 0, -item[1]))
        return StepSchedule(decodes, chunks)

    def _grow(self, sequence: Sequence) -> None:
        """Pages for all tokens of a running sequence; the newest ones make room."""
        missing = self._cache.pages_for(len(sequence)) - len(sequence.pages)
        while missing > self._cache.num_free:
            if self._forget_held():
                continue
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return
        if missing > 0:
            sequence.pages += self._cache.allocate(missing)

    def _forget_held(self) -> bool:
        """Let go of pages held for samples that wait: these will compute their prompt again."""
        for sequence in reversed(self._waiting):  # the first in line will share them soonest
            if sequence.forked and sequence.prompt.pages:
                self._cache.release(sequence.prompt.pages)
                sequence.prompt.pages = []
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; it waits in front and is computed again."""
        self._running.remove(sequence)
        self._cache.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self) -> None:
        if not self._waiting:
            return
        budget = self._max_num_batched_tokens - sum(len(s) - s.computed for s in self._running)
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            sequence = self._waiting[0]
            shares = sequence.forked and bool(sequence.prompt.pages)
            needed = self._pages_to_admit(sequence, shares)
            # A little room to grow, or what comes in would be thrown out at once.
            spare = (
                -(-len(self._running) // 16) if self._cache.num_pages > self._max_num_seqs else 0
            )
            if needed + spare > self._cache.num_free:
                # NOTE: with nobody running nobody will free a page; held ones must give way.
                if not self._running and self._forget_held():
                    continue
                return
            self._waiting.popleft()
            if shares:
                self._fork(sequence)
            else:
                sequence.pages = self._cache.allocate(needed)
            self._leave_group(sequence)
            self._running.append(sequence)
            budget -= len(sequence) - sequence.computed

    def _pages_to_admit(self, sequence: Sequence, shares: bool) -> int:
        needed = self._cache.pages_for(len(sequence))
        if not shares:
            return needed
        return needed - len(sequence.prompt.pages) + self._must_copy(sequence.prompt)

    def _must_copy(self, prompt: Prompt) -> bool:
        """Whether the page the prompt ends in is written by another sample already."""
        partial = len(prompt.ids) % self._cache.page_size > 0
        return partial and self._cache.num_users(prompt.pages[-1]) > 1

    def _fork(self, sequence: Sequence) -> None:
        """Share the prompt's pages; copy the last one where another sample goes on writing it."""
        prompt, cache = sequence.prompt, self._cache
        pages = list(prompt.pages)
        if self._must_copy(prompt):
            (own,) = cache.allocate(1)
            cache.copy_page(pages[-1], own, (len(prompt.ids) - 1) % cache.page_size + 1)
            cache.retain(pages[:-1])
            pages[-1] = own
        else:
            cache.retain(pages)
        missing = cache.pages_for(len(sequence)) - len(pages)
        sequence.pages = pages + cache.allocate(missing)
        sequence.computed = len(prompt.ids)

    def _leave_group(self, sequence: Sequence) -> None:
        if not sequence.forked:
            return
        sequence.forked = False
        prompt = sequence.prompt
        prompt.waiting -= 1
        if prompt.waiting == 0 and prompt.pages:
            self._cache.release(prompt.pages)
            prompt.pages = []

    def _compact(self) -> None:
        """Where a page is a whole sequence: keep the used ones together, in front.

        Then a batch is a plain slice of the cache. Only once nobody waits: else the next one fills
        the gap.
        """
        if self._waiting or any(len(s.pages) != 1 for s in self._running):
            return
        for sequence in self._running:
            page = sequence.pages[0]
            if page >= len(self._running) and self._cache.num_users(page) == 1:
                sequence.pages = [self._cache.swap_out(page, sequence.computed)]

    # -- what came of it ---------------------------------------------------------------------------

    def computed(self, schedule: StepSchedule) -> None:
        """The step has run: its tokens are in the cache."""
        for sequence in schedule.decodes:
            sequence.computed += 1
        for sequence, count in schedule.chunks:
            sequence.computed += count

    def spawn(self, sequence: Sequence) -> list[Sequence]:
        """The samples that begin once a prompt's first sample has computed it; all draw from its
        row.

        Returns ``sequence`` alone where there are no others, or they exist already.
        """
        prompt = sequence.prompt
        if prompt.num_samples == 1 or sequence.sample > 0 or sequence.answer:
            return [sequence]
        return [sequence, *(Sequence(prompt, i, forked=True) for i in range(1, prompt.num_samples))]

    def queue_samples(self, first: Sequence, samples: list[Sequence]) -> None:
        """``samples`` of ``first``'s prompt, their first token drawn, wait for its pages."""
        if not samples:
            return
        prompt = first.prompt
        prompt.pages = first.pages[: self._cache.pages_for(len(prompt.ids))]
        self._cache.retain(prompt.pages)
        prompt.waiting = len(samples)
        self._waiting.extendleft(reversed(samples))

    def finish(self, sequence: Sequence) -> None:
        """A running sequence has its last token."""
        self._running.remove(sequence)
        self._cache.release(sequence.pages)
        sequence.pages = []

    def clear(self) -> None:
        """Give everything up: all pages are free again."""
        for sequence in self._running:
            self._cache.release(sequence.pages)
        for sequence in self._waiting:
            if sequence.forked and sequence.prompt.pages:
                self._cache.release(sequence.prompt.pages)
                sequence.prompt.pages = []
        self._running.clear()
        self._waiting.clear()
