"""Schedules sequences and cache pages for continuous batching.

Each step, `Scheduler.schedule` selects the sequences and the number of tokens that each computes.
It depends on lengths and tokens alone, so all ranks of a tensor-parallel group make the same
schedule without communication.

A sequence's tokens are prompt + answer; the first ``computed`` of them have keys and values in the
cache. A step computes the others and then draws one token: the others are usually one (decode), at
first the whole prompt (prefill), after a preemption everything.

Samples of a prompt are one row (`Sequence.twins`) as long as their answers are the same. Then they
share the pages so far; the last one, if it is partly filled, is copied, because their answers
differ. A sequence whose first pages another one has computed, now or in an earlier call, shares
those.
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from dschat.config import UserError
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.requests.sequence import Request, Sequence, StepSchedule, rows_of
from dschat.inference.requests.stats import GenerationStats

# With separate prefill, prompts wait until they are this share of the running sequences. On a GPU
# an eager prefill of one prompt is estimated to take as long as 2.5 decode steps.
_GROUP = 1 / 8


class Scheduler:
    """Runs up to ``max_num_seqs`` rows, with up to ``max_num_batched_tokens`` tokens a step.

    ``separate_prefill``: no sequence decodes in a step with prompt chunks, and prompts are admitted
    in groups, so that most steps are decode steps that a graph can replay. Between two calls of
    `schedule` the caller may then run any number of decode steps (`extend`) and append their tokens
    later; it has appended them all when it calls `schedule` again.

    ``samples_apart``: each sample is a row of its own from its second token on, because captured
    steps draw for one sequence a row.

    ``stats``: counts preemptions, pages and tokens found in the cache; others count more there.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        separate_prefill: bool = False,
        samples_apart: bool = False,
    ) -> None:
        self._cache = cache
        self._separate_prefill, self._samples_apart = separate_prefill, samples_apart
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._held: Counter[int] = Counter()  # the waiting sequences whose last page this is
        self.stats = GenerationStats(num_pages=cache.num_pages, max_num_seqs=max_num_seqs)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue ``sequences``, first those with tokens from an earlier call; longest first."""
        rows = rows_of(sequences, self._samples_apart)
        self._waiting.extend(sorted(rows, key=lambda s: (not s.answer, -len(s))))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    # -- scheduling --------------------------------------------------------------------------------

    def schedule(self) -> StepSchedule:
        """The next step. Every sequence in it has pages for its new tokens."""
        size = self._cache.page_size
        for sequence in list(self._running):
            # NOTE: a sequence without pages was preempted earlier in this loop.
            if sequence.pages and len(sequence) > size * len(sequence.pages):
                self._grow(sequence)
        self._admit()
        self._compact()
        self._count_pages()
        decodes = [s for s in self._running if self._decodes(s)]
        if self._separate_prefill and len(decodes) < len(self._running):
            decodes = []
        decodes.sort(key=lambda s: s.pages[0] if s.slot is None else s.slot)
        budget = max(1, self._max_num_batched_tokens - len(decodes))
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            if budget > 0 and not self._decodes(sequence):
                chunks.append((sequence, min(len(sequence) - sequence.computed, budget)))
                budget -= chunks[-1][1]
        if not decodes and not chunks:
            raise UserError(
                "the KV cache has no room: other answers of this engine are not finished; read or "
                "close their streams, or raise kv_cache_gib"
            )
        # Whole prompts first, longest first; then by prefix: they attend as padded batches.
        chunks.sort(key=lambda item: (item[0].computed, -item[1]))
        return StepSchedule(decodes, chunks)

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether a running sequence is a row of the next step's decodes."""
        rest = len(sequence) - sequence.computed
        if not self._separate_prefill:
            return rest == 1
        # NOTE: tokens of steps that have run may not be in the answer yet. A first token is drawn
        # for all samples of a prompt, which decode steps on the device do not.
        return rest <= 1 and bool(sequence.answer)

    def _cost(self, sequence: Sequence) -> int:
        """Tokens of a step's budget that a running sequence leaves to no prompt."""
        if self._separate_prefill and self._decodes(sequence):
            return 0
        return len(sequence) - sequence.computed

    def _count_pages(self) -> None:
        used = self._cache.num_pages - self._cache.num_free
        self.stats.peak_pages = max(self.stats.peak_pages, used)

    def extend(self, sequence: Sequence) -> bool:
        """Allocate the page of a decode's next token. False: `schedule` must make room first."""
        if sequence.computed == self._cache.page_size * len(sequence.pages):
            if not self._cache.num_free:
                return False
            sequence.pages += self._cache.allocate(1)
            self._count_pages()
        return True

    def spare_tokens(self, schedule: StepSchedule) -> int:
        """Tokens that fit into a step beside its own."""
        return max(0, self._max_num_batched_tokens - schedule.num_tokens)

    def room_for(self, sequence: Sequence, count: int) -> int:
        """Allocate pages for up to ``count`` more tokens, and return for how many there are.

        No sequence is preempted for them.
        """
        cache = self._cache
        missing = cache.pages_for(len(sequence) + count) - len(sequence.pages)
        if missing > 0 and cache.num_free:
            sequence.pages += cache.allocate(min(missing, cache.num_free))
            self._count_pages()
        return min(count, len(sequence.pages) * cache.page_size - len(sequence))

    @property
    def would_admit(self) -> bool:
        """Whether `schedule` would admit a sequence; only with separate prefill."""
        return self._fits_next() and (bool(self._waiting[0].pages) or self._worth_a_prefill())

    def _grow(self, sequence: Sequence) -> None:
        """Allocate pages for all tokens of a running sequence, preempting the newest if needed."""
        missing = self._cache.pages_for(len(sequence)) - len(sequence.pages)
        while missing > self._cache.num_free:
            if self._release_held():
                continue
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return
        if missing > 0:
            sequence.pages += self._cache.allocate(missing)

    def _release_held(self) -> bool:
        """Release the pages of a sequence that waits, which will then be computed again."""
        for sequence in reversed(self._waiting):  # the first in the queue needs them soonest
            if sequence.pages:
                self._give_up_pages(sequence)
                self.stats.preemptions += 1
                return True
        return False

    def _give_up_pages(self, sequence: Sequence) -> None:
        """Release what a waiting sequence holds."""
        if sequence.pages:
            self._held[sequence.pages[-1]] -= 1
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        pages, sequence.pages = sequence.pages, []
        self._cache.release(pages)
        if self._cache.states is not None and sequence.slot is not None:
            self._cache.states.release(sequence.slot)
        sequence.slot, sequence.computed, sequence.next_key = None, 0, None

    def _preempt(self, sequence: Sequence) -> None:
        """Release a sequence's pages; it waits at the front of the queue and is computed again."""
        self._running.remove(sequence)
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _admit(self) -> None:
        if not self._waiting:
            return
        budget = self._max_num_batched_tokens - sum(map(self._cost, self._running))
        may_prefill = not self._separate_prefill or self._worth_a_prefill()
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            if not self._waiting[0].pages and not may_prefill:
                return
            if self._is_being_computed(self._waiting[0]):
                return
            if not self._fits_next():
                # NOTE: if no sequence runs, only the held pages can be freed.
                if not self._running and self._release_held():
                    continue
                return
            sequence = self._waiting.popleft()
            if sequence.pages:
                self._resume(sequence)
            else:
                self._allocate(sequence)
            self._running.append(sequence)
            budget -= self._cost(sequence)

    def _allocate(self, sequence: Sequence) -> None:
        """Allocate pages for all tokens, but those of a prefix that is in the cache."""
        cache = self._cache
        if cache.states is not None:
            sequence.slot = cache.states.allocate()
        pages, sequence.next_key = cache.find(sequence.findable)
        cache.retain(pages)
        sequence.pages = pages + cache.allocate(cache.pages_for(len(sequence)) - len(pages))
        sequence.computed = len(pages) * cache.page_size
        self.stats.cached_tokens += sequence.computed

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing a page that this one can share after the step."""
        computing = {s.next_key for s in self._running} - {None}
        return bool(computing) and self._cache.find(sequence.findable)[1] in computing

    def _fits_next(self) -> bool:
        """Whether a slot and pages are free for the first sequence in the queue."""
        if not self._waiting or len(self._running) == self._max_num_seqs:
            return False
        # Spare pages for growth, else the new sequence could be preempted at once.
        spare = -(-len(self._running) // 16) if self._cache.num_pages > self._max_num_seqs else 0
        return self._pages_to_admit(self._waiting[0]) + spare <= self._cache.num_free

    def _worth_a_prefill(self) -> bool:
        """Whether enough prompts have room to interrupt decoding for them."""
        if not all(map(self._decodes, self._running)):
            return True  # it is interrupted already
        free, count = self._cache.num_free, 0
        for sequence in islice(self._waiting, self._max_num_seqs - len(self._running)):
            free -= self._cache.pages_for(len(sequence))
            count += free >= 0
        return count >= min(_GROUP * (len(self._running) + count), len(self._waiting))

    def _pages_to_admit(self, sequence: Sequence) -> int:
        needed = self._cache.pages_for(len(sequence))
        if not sequence.pages:
            found, _ = self._cache.find(sequence.findable)
            return needed - sum(self._cache.num_users(page) > 0 for page in found)
        return needed - len(sequence.pages) + self._must_copy(sequence)

    def _promote_holders(self, pages: list[int]) -> None:
        """Queue first the sequences that can write to one of ``pages`` without copying it."""
        for page in pages:
            if 0 < self._held[page] == self._cache.num_users(page):
                holder = next(s for s in self._waiting if s.pages and s.pages[-1] == page)
                self._waiting.remove(holder)
                self._waiting.appendleft(holder)

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence must copy its last page, because a running one uses it.

        Other waiting sequences do not count: they have no more tokens in the page than this one,
        which therefore overwrites none of theirs.
        """
        page = sequence.pages[-1]
        partial = sequence.computed % self._cache.page_size > 0
        return partial and self._cache.num_users(page) > self._held[page]

    def _resume(self, sequence: Sequence) -> None:
        """Run a waiting sequence that has kept its pages: allocate the ones it will write to."""
        cache, pages = self._cache, sequence.pages
        must_copy, last = self._must_copy(sequence), pages[-1]
        self._held[last] -= 1
        if must_copy:
            (copy,) = cache.allocate(1)
            cache.copy_page(last, copy, sequence.computed % cache.page_size)
            cache.release([last])
            pages[-1] = copy
        elif sequence.computed % cache.page_size:
            cache.withdraw(last)  # a sequence that has ended may have written its tokens there
        pages += cache.allocate(cache.pages_for(len(sequence)) - len(pages))
        if cache.states is not None and sequence.slot is not None:
            sequence.slot = cache.states.own(sequence.slot)

    def _compact(self) -> None:
        """If a page holds a whole sequence, move the used pages to the front of the cache.

        A batch is then a slice of the cache. Not while sequences wait: the next one fills the gap.
        """
        if (
            self._waiting
            or self._cache.keeps_prefixes
            or any(len(s.pages) != 1 for s in self._running)
        ):
            return
        for sequence in self._running:
            page = sequence.pages[0]
            if page >= len(self._running) and self._cache.num_users(page) == 1:
                sequence.pages = [self._cache.swap_out(page, sequence.computed)]

    # -- results of a step -------------------------------------------------------------------------

    def computed(self, schedule: StepSchedule) -> None:
        """Record that the step has run: its tokens are in the cache."""
        for sequence in schedule.decodes:
            sequence.computed += 1
        for sequence, count in schedule.chunks:
            sequence.computed += count
            self._cache.publish(sequence.tokens(0, sequence.computed), sequence.pages)
            _, sequence.next_key = self._cache.find(sequence.findable)

    def split_row(self, first: Sequence, unfinished: list[Sequence]) -> None:
        """Record that all sequences of ``first``'s row have drawn. Those with the same answer are a
        row again; ``unfinished`` are those that have more to draw.
        """
        if not unfinished:
            self.finish(first)
            return
        known = first.computed - len(first.request.ids)
        rows = rows_of(unfinished, self._samples_apart, known)
        # Pages: rows[0] goes on with those of the old row. The others read the same pages and hold
        # them (`_held`) while they wait; `_resume` copies the last one before they write to it.
        pages = first.pages
        self._replace(first, rows[0])
        for sequence in rows:
            sequence.computed = len(sequence) - 1
        keeps = self._share_state(rows)
        for sequence in rows[1:]:
            sequence.computed = sequence.computed if keeps else 0
            sequence.pages = pages[: self._cache.pages_for(sequence.computed)]
            self._cache.retain(sequence.pages)
            if keeps:
                self._held[sequence.pages[-1]] += 1
        self._waiting.extendleft(reversed(rows[1:]))

    def _share_state(self, rows: list[Sequence]) -> bool:
        """Whether all ``rows`` keep the state of the first one, which goes on with a copy; else the
        others are computed again.
        """
        states, slot = self._cache.states, rows[0].slot
        if states is None or slot is None or not rows[1:]:
            return True
        if states.num_free <= self._max_num_seqs - len(self._running):
            return False  # those are for rows that may yet be admitted
        for sequence in rows[1:]:
            sequence.slot = states.retain(slot)
        rows[0].slot = states.own(slot)
        return True

    def _replace(self, first: Sequence, other: Sequence) -> None:
        """Give ``other``, of the same row, the place and the pages of ``first``."""
        if other is first:
            return
        queue = self._running if first in self._running else self._waiting
        queue[queue.index(first)] = other
        other.pages, other.computed, other.next_key = first.pages, first.computed, first.next_key
        other.slot, first.slot, first.pages = first.slot, None, []

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence that has its last token."""
        self._running.remove(sequence)
        # NOTE: steps on the device may have run past the last token.
        known, pages = min(sequence.computed, len(sequence) - 1), sequence.pages
        # Published first: a page that is released without it is not found again.
        self._cache.publish(sequence.tokens(0, known), pages)
        self._release(sequence)
        self._promote_holders(pages)

    def drop(self, request: Request, sample: int | None = None) -> None:
        """Remove the answers to ``request``, or one of them, before they have their last token."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.request is not request:
                continue
            row = sequence.row
            left = [s for s in row if sample not in (None, s.sample)]
            if len(left) == len(row):
                continue
            if left:
                left[0].twins = left[1:]
                self._replace(sequence, left[0])
            elif sequence in self._running:
                self.finish(sequence)
            else:
                self._give_up_pages(sequence)
                self._waiting.remove(sequence)

    def clear(self) -> None:
        """Drop all sequences and free their pages."""
        for sequence in [*self._running, *self._waiting]:
            self._release(sequence)
        self._held.clear()
        self._running.clear()
        self._waiting.clear()
