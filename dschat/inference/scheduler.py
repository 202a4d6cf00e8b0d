"""Schedules sequences and cache pages for continuous batching.

Each step, `Scheduler.schedule` selects the sequences and the number of tokens that each computes.
It depends on lengths and tokens alone, so all ranks of a tensor-parallel group make the same
schedule without communication.

A sequence's tokens are prompt + answer; the first ``computed`` of them have keys and values in the
cache. A step computes the others and then draws one token, or more with a draft: the others are
usually one (decode), at first the whole prompt (prefill), after a preemption everything. Samples of
one prompt share its pages; the last page, if it is partly filled, is copied, because their answers
differ. A sequence whose first pages another one has computed, now or in an earlier call, shares
those.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from dschat.config import UserError
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.sequence import Prompt, Sequence, StepSchedule

# With separate prefill, prompts wait until they are this share of the running sequences. On a GPU
# an eager prefill of one prompt is estimated to take as long as 2.5 decode steps.
_GROUP = 1 / 8


class Scheduler:
    """Runs up to ``max_num_seqs`` sequences, with up to ``max_num_batched_tokens`` tokens a step.

    ``separate_prefill``: no sequence decodes in a step with prompt chunks, and prompts are admitted
    in groups, so that most steps are decode steps that a graph can replay. Between two calls of
    `schedule` the caller may then run any number of decode steps (`extend`) and append their tokens
    later; it has appended them all when it calls `schedule` again.

    Statistics: ``preemptions``, ``peak_pages``, ``cached_tokens`` (found, not computed).
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        separate_prefill: bool = False,
    ) -> None:
        self._cache = cache
        self._separate_prefill = separate_prefill
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.peak_pages = 0
        self.cached_tokens = 0

    def add(self, prompts: list[Prompt], begun: Iterable[Sequence] = ()) -> None:
        """Queue sequences ``begun`` before and the first sample of each prompt, longest first."""
        for sequences in (begun, [Sequence(prompt, 0) for prompt in prompts]):
            self._waiting.extend(sorted(sequences, key=lambda s: -len(s)))

    @property
    def page_size(self) -> int:
        return self._cache.page_size

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
        decodes.sort(key=lambda s: s.pages[0])
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
        schedule = StepSchedule(decodes, chunks)
        schedule.sort_chunks()
        return schedule

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether a running sequence is a row of the next step's decodes."""
        rest = len(sequence) - sequence.computed
        if not self._separate_prefill:
            return rest == 1
        # NOTE: tokens of steps that have run may not be in the answer yet. A first token is drawn
        # for all samples of a prompt, which decode steps on the device do not.
        return rest <= 1 and bool(sequence.answer)

    def _cost(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that leave fewer for prompts in a step."""
        if self._separate_prefill and self._decodes(sequence):
            return 0
        return len(sequence) - sequence.computed

    def _count_pages(self) -> None:
        used = self._cache.num_pages - self._cache.num_free
        self.peak_pages = max(self.peak_pages, used)

    def extend(self, sequence: Sequence) -> bool:
        """Allocate the page of a decode's next token. False: `schedule` must make room first."""
        if sequence.computed == self._cache.page_size * len(sequence.pages):
            if not self._cache.num_free:
                return False
            sequence.pages += self._cache.allocate(1)
            self._count_pages()
        return True

    def draft_budget(self, schedule: StepSchedule) -> int:
        """Tokens of drafts that fit into a step."""
        return max(0, self._max_num_batched_tokens - schedule.num_tokens)

    def room_for(self, sequence: Sequence, count: int) -> int:
        """Allocate pages for up to ``count`` tokens of a draft, and return for how many there are.

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
        return self._fits_next() and (_shares(self._waiting[0]) or self._worth_a_prefill())

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
        """Release pages held for waiting samples, which will then compute their prompt again."""
        for sequence in reversed(self._waiting):  # the first in the queue needs them soonest
            if sequence.forked and sequence.prompt.pages:
                self._cache.release(sequence.prompt.pages)
                sequence.prompt.pages = []
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Release a sequence's pages; it waits at the front of the queue and is computed again."""
        self._running.remove(sequence)
        self._cache.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.next_key = [], 0, None
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self) -> None:
        if not self._waiting:
            return
        budget = self._max_num_batched_tokens - sum(map(self._cost, self._running))
        may_prefill = not self._separate_prefill or self._worth_a_prefill()
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            if not _shares(self._waiting[0]) and not may_prefill:
                return
            if self._is_being_computed(self._waiting[0]):
                return
            if not self._fits_next():
                # NOTE: if no sequence runs, only the held pages can be freed.
                if not self._running and self._release_held():
                    continue
                return
            sequence = self._waiting.popleft()
            if _shares(sequence):
                self._fork(sequence)
            else:
                self._allocate(sequence)
            self._leave_group(sequence)
            self._running.append(sequence)
            budget -= self._cost(sequence)

    def _allocate(self, sequence: Sequence) -> None:
        """Pages for all tokens; the first ones may be computed already."""
        cache = self._cache
        pages, sequence.next_key = cache.find(_findable(sequence))
        cache.retain(pages)
        sequence.pages = pages + cache.allocate(cache.pages_for(len(sequence)) - len(pages))
        sequence.computed = len(pages) * cache.page_size
        self.cached_tokens += sequence.computed

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes a page that this one could share after the step."""
        computing = {s.next_key for s in self._running} - {None}
        return bool(computing) and self._cache.find(_findable(sequence))[1] in computing

    def _fits_next(self) -> bool:
        """Whether a slot and pages are free for the first sequence in the queue."""
        if not self._waiting or len(self._running) == self._max_num_seqs:
            return False
        # Spare pages for growth, else the new sequence could be preempted at once.
        spare = -(-len(self._running) // 16) if self._cache.num_pages > self._max_num_seqs else 0
        return self._pages_to_admit(self._waiting[0]) + spare <= self._cache.num_free

    def _worth_a_prefill(self) -> bool:
        """Whether to hold up the decoding sequences for the prompts that have room now."""
        if not all(map(self._decodes, self._running)):
            return True  # they are held up already
        free, count = self._cache.num_free, 0
        for sequence in islice(self._waiting, self._max_num_seqs - len(self._running)):
            free -= self._cache.pages_for(len(sequence))
            count += free >= 0
        return count >= min(_GROUP * (len(self._running) + count), len(self._waiting))

    def _pages_to_admit(self, sequence: Sequence) -> int:
        needed = self._cache.pages_for(len(sequence))
        if not _shares(sequence):
            found, _ = self._cache.find(_findable(sequence))
            return needed - sum(self._cache.num_users(page) > 0 for page in found)
        return needed - len(sequence.prompt.pages) + self._must_copy(sequence.prompt)

    def _must_copy(self, prompt: Prompt) -> bool:
        """Whether another sample already writes to the prompt's last page."""
        partial = len(prompt.ids) % self._cache.page_size > 0
        return partial and self._cache.num_users(prompt.pages[-1]) > 1

    def _fork(self, sequence: Sequence) -> None:
        """Share the prompt's pages; copy the last one if another sample writes to it."""
        prompt, cache = sequence.prompt, self._cache
        pages = list(prompt.pages)
        if self._must_copy(prompt):
            (copy,) = cache.allocate(1)
            cache.copy_page(pages[-1], copy, (len(prompt.ids) - 1) % cache.page_size + 1)
            cache.retain(pages[:-1])
            pages[-1] = copy
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
            _, sequence.next_key = self._cache.find(_findable(sequence))

    def spawn(self, sequence: Sequence) -> list[Sequence]:
        """All samples of a prompt that its first sample has just computed; they draw from one row.

        Returns only ``sequence`` if it is the only sample or the others already exist.
        """
        if not sequence.draws_for_all:
            return [sequence]
        prompt = sequence.prompt
        return [sequence, *(Sequence(prompt, i, forked=True) for i in range(1, prompt.num_samples))]

    def queue_samples(self, first: Sequence, samples: list[Sequence]) -> None:
        """Queue ``samples`` of ``first``'s prompt, which have one token, to share its pages."""
        if not samples:
            return
        prompt = first.prompt
        prompt.pages = first.pages[: self._cache.pages_for(len(prompt.ids))]
        self._cache.retain(prompt.pages)
        prompt.waiting = len(samples)
        self._waiting.extendleft(reversed(samples))

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence that has its last token."""
        self._running.remove(sequence)
        # NOTE: steps on the device may have run past the last token.
        known = min(sequence.computed, len(sequence) - 1)
        if sequence.prompt.waiting:  # a sample that waits will write to the prompt's last page
            known = min(known, len(sequence.prompt.ids))
        self._cache.publish(sequence.tokens(0, known), sequence.pages)
        self._cache.release(sequence.pages)
        sequence.pages = []

    def drop(self, prompt: Prompt, sample: int | None = None) -> None:
        """Remove the samples of ``prompt``, or one of them, before they have their last token."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.prompt is not prompt or sample not in (None, sequence.sample):
                continue
            if sequence in self._running:
                self.finish(sequence)
            else:
                self._waiting.remove(sequence)
                self._leave_group(sequence)

    def clear(self) -> None:
        """Drop all sequences and free their pages."""
        for sequence in self._running:
            self._cache.release(sequence.pages)
        while self._release_held():
            pass
        self._running.clear()
        self._waiting.clear()


def _findable(sequence: Sequence) -> list[int]:
    """The tokens whose keys and values may be found: the last one's logits are needed."""
    return sequence.tokens(0, len(sequence) - 1)


def _shares(sequence: Sequence) -> bool:
    """Whether a waiting sequence will share its prompt's pages."""
    return sequence.forked and bool(sequence.prompt.pages)
