"""Plays schedules with a source of tokens in place of a model, and checks the pages on the way.

For every token a number is written into the cache, at the slot that the schedule implies: one that
stands for the token and all before it, as keys and values do. Before a sequence draws, its pages
must hold exactly its numbers: that catches a page that was lost, shared in writing, copied short,
freed early, or found by the wrong tokens. Answers may begin with forced tokens, of which a step
computes several.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from transformers import PretrainedConfig

from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.states import StatePool, StateShape, num_slots
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.scheduler import Scheduler
from dschat.inference.requests.sequence import Request

MAX_SEQ_LEN = 24
STATE = (StateShape(0, "recurrent_states", 0, (), torch.float32),)


@dataclass
class Case:
    """A rollout: prompts by length, the lengths that their answers will have, and the limits."""

    prompt_lengths: list[int]
    answer_lengths: list[list[int]]  # of each prompt's samples
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    separate_prefill: bool = False
    vocabulary: int = 0  # 0: every token is another; few tokens: prompts and answers share prefixes
    keeps_prefixes: bool = False
    forced: int = 0  # first tokens of all answers to a prompt that has so many
    agree: int = 0  # first tokens of all answers to a prompt; as many more of every second one
    samples_apart: bool = False
    has_states: bool = False

    def num_forced(self, prompt):
        """A token at least is drawn."""
        return min(self.forced, min(self.answer_lengths[prompt]) - 1)

    def token(self, prompt, sample, position):
        """The same in every run. The prompt's own are those of "sample" 7."""
        if sample != 7 and position < max(self.agree, self.num_forced(prompt)):
            sample = 6
        elif sample != 7 and position < 2 * self.agree:
            sample = 4 + sample % 2
        token = token_of(prompt, sample, position)
        return hash((token, 5)) // 8 % self.vocabulary if self.vocabulary else token


@st.composite
def cases(draw):
    prompt_lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=7))
    n = draw(st.integers(1, 4))
    # Samples that end with their first token leave pages held with nobody running.
    answers = st.lists(st.sampled_from([1, 1, 2, 3, 6, 10]), min_size=n, max_size=n)
    answer_lengths = [draw(answers) for _ in prompt_lengths]
    page_size = draw(st.sampled_from([1, 2, 3, 5, 8, MAX_SEQ_LEN]))
    longest = max(p + max(a) for p, a in zip(prompt_lengths, answer_lengths, strict=True))
    fewest = -(-longest // page_size)
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    has_states = draw(st.sampled_from([False, False, True]))
    most = max(fewest, max_num_seqs * -(-MAX_SEQ_LEN // page_size))
    return Case(
        prompt_lengths,
        answer_lengths,
        page_size,
        draw(st.integers(fewest, min(most, fewest + draw(st.sampled_from([0, 2, 12]))))),
        max_num_seqs,
        draw(st.integers(1, 30)),
        draw(st.booleans()),
        draw(st.sampled_from([0, 1, 2])),
        draw(st.booleans()) and not has_states,
        draw(st.sampled_from([0, 3, 8])),
        draw(st.integers(0, 4)),
        draw(st.sampled_from([False, False, True])),
        has_states,
    )


def token_of(prompt, sample, position):
    """A number that stands nowhere else."""
    return 1 + position + 32 * (sample + 8 * prompt)


PREFIXES: dict[tuple[int, ...], int] = {}


def prefix_numbers(tokens):
    """A number for each prefix, small enough to be exact in fp32."""
    return [
        PREFIXES.setdefault(tuple(tokens[:end]), len(PREFIXES) + 1)
        for end in range(1, len(tokens) + 1)
    ]


@dataclass
class Run:
    """The case played to its end, checked on the way."""

    case: Case
    finished: list = field(default_factory=list)
    trace: list = field(default_factory=list)
    prefilled: int = 0
    steps: int = 0

    def __post_init__(self):
        case = self.case
        sizes = 1, case.num_pages, case.page_size, 1, 1, torch.float32, torch.device("cpu")
        self.states = None
        if case.has_states:
            count = num_slots(case.max_num_seqs)
            self.states = StatePool(STATE, count, PretrainedConfig(), sizes[-1])
            (self.state,) = self.states.tensors.values()
        self.cache = KVCache(*sizes, case.keeps_prefixes, self.states)
        self.call(
            [
                [case.token(number, 7, position) for position in range(length)]
                for number, length in enumerate(case.prompt_lengths)
            ]
        )

    def call(self, prompts):
        """Begin a call of an engine with these prompts; the cache stays."""
        case = self.case
        limits = case.max_num_seqs, case.max_num_batched_tokens
        apart = case.separate_prefill, case.samples_apart
        self.scheduler = Scheduler(self.cache, *limits, *apart)
        self.ask(prompts)

    def ask(self, prompts):
        """Queue these prompts, while the scheduler has no others."""
        self.texts, answers = prompts, self.case.answer_lengths
        self.prompts = []
        for i, ids in enumerate(prompts):
            forced = [self.case.token(i, 0, place) for place in range(self.case.num_forced(i))]
            sampling = SamplingParams(max(answers[i]) - len(forced), n=len(answers[i]))
            self.prompts.append(Request(ids, sampling, i, forced=forced))
        self.scheduler.add(s for request in self.prompts for s in request.sequences)
        self.finished, self.steps, self.dropped = [], 0, set()
        self.bound = 50 + 60 * sum(map(len, answers)) * MAX_SEQ_LEN

    def drop(self, prompt, sample=None):
        self.scheduler.drop(prompt, sample)
        samples = range(len(prompt.sequences)) if sample is None else [sample]
        self.dropped.update((prompt.number, i) for i in samples)

    def until(self, steps):
        while self.scheduler.has_work and self.steps < steps:
            self.step()
        return self

    def to_the_end(self):
        """Every sequence finishes once, unless it was dropped, and no page is lost."""
        self.until(self.bound)
        assert not self.scheduler.has_work, "no end in sight"
        answers, finished = set(expected(self.case)), set(self.finished)
        assert len(self.finished) == len(finished)
        assert finished <= answers
        assert all(answer[:2] in self.dropped for answer in answers - finished)
        assert self.cache.num_free == self.case.num_pages
        if self.states is not None:
            assert self.states.num_free == len(self.state) - 1
        return self

    def step(self):
        schedule = self.scheduler.schedule()
        self.check_limits(schedule)
        self.force(schedule)
        self.write(schedule)
        self.trace.append(
            [(s.request.number, s.sample, s.pages[:], 1) for s in schedule.decodes]
            + [(s.request.number, s.sample, s.pages[:], count) for s, count in schedule.chunks]
        )
        ready = schedule.ready
        self.scheduler.computed(schedule)
        for first in ready:
            self.check_content(first, len(first))
            self.advance(first)
        for s in (s for prompt in self.prompts for s in prompt.sequences if s.pages):
            self.check_content(s, s.computed)  # also of those that wait
        self.check_found()
        self.steps += 1

    def force(self, schedule):
        """As `Core`: let the step compute forced tokens, as far as it has room."""
        budget = self.scheduler.spare_tokens(schedule)
        for s in schedule.ready:
            size = self.scheduler.room_for(s, max(0, min(-s.num_drawn, budget)))
            s.forced = s.request.forced[len(s.answer) :][:size]
            budget -= size

    def check_limits(self, schedule):
        case = self.case
        in_step = schedule.decodes + [s for s, _ in schedule.chunks]
        assert 0 < len(in_step) <= case.max_num_seqs
        assert len({id(s) for s in in_step}) == len(in_step)
        assert all(len(s) - s.computed == 1 for s in schedule.decodes)
        assert all(0 < count <= len(s) - s.computed for s, count in schedule.chunks)
        assert not (case.separate_prefill and schedule.decodes and schedule.chunks)
        # Else no decode is ever held up; prompts take what the budget leaves, or one token.
        budget = max(1, case.max_num_batched_tokens - len(schedule.decodes))
        assert sum(count for _, count in schedule.chunks) <= budget
        writers = [self.pages_written(s, 1) for s in schedule.decodes]
        writers += [self.pages_written(s, count) for s, count in schedule.chunks]
        written = [page for pages in writers for page in pages]
        assert len(set(written)) == len(written), "two sequences write one page"

    def pages_written(self, s, count):
        size = self.case.page_size
        assert len(s.pages) * size >= s.computed + count, "no page for a new token"
        return set(s.pages[s.computed // size : (s.computed + count - 1) // size + 1])

    def write(self, schedule):
        size = self.case.page_size
        for s, count in [(s, 1) for s in schedule.decodes] + schedule.chunks:
            first, end = s.computed, s.computed + count
            assert len(s.tokens(first, end)) == count
            if end == len(s):
                end += len(s.forced)
            numbers = prefix_numbers(s.request.ids + s.answer + s.forced)[first:end]
            for position, number in enumerate(numbers, start=first):
                self.cache.pairs[0, s.pages[position // size], position % size, 0] = number
            self.prefilled += count if not s.answer else 0
            if self.states is not None:
                self.check_state(s, first)
                self.state[s.slot] = numbers[-1]

    def check_state(self, s, count):
        """A new state is written without being read."""
        if self.states is not None and count:
            numbers = prefix_numbers(s.request.ids + s.answer + s.forced)
            assert self.state[s.slot].item() == numbers[count - 1]

    def check_content(self, s, count):
        assert s.computed == count
        self.check_state(s, count + len(s.forced))
        held = self.cache.pairs[0, s.pages, :, 0].flatten()[:count].tolist()
        assert held == prefix_numbers(s.request.ids + s.answer)[:count]

    def check_found(self):
        """What later prompts would find: the pages of whatever has ended."""
        for number, _, answer in self.finished:
            text = self.prompts[number].ids + list(answer)
            pages, _ = self.cache.find(text)
            found = self.cache.pairs[0, pages, :, 0].flatten().tolist()
            assert found == prefix_numbers(text)[: len(found)]

    def advance(self, first):
        """As `Core`: a row's samples get its forced tokens, and one that each draws."""
        alive = []
        count, first.forced = len(first.forced) + 1, []
        assert all(s.tokens(0, 99) == first.tokens(0, 99) for s in first.row)
        for s in first.row:
            for _ in range(count):
                s.answer.append(self.case.token(s.request.number, s.sample, len(s.answer)))
            if len(s.answer) == self.case.answer_lengths[s.request.number][s.sample]:
                self.finished.append((s.request.number, s.sample, tuple(s.answer)))
            else:
                alive.append(s)
        if len(first.row) > 1 or not alive:
            self.scheduler.split_row(first, alive)
        else:
            first.computed = len(first) - 1


def expected(case):
    return [
        (number, sample, tuple(case.token(number, sample, i) for i in range(length)))
        for number, lengths in enumerate(case.answer_lengths)
        for sample, length in enumerate(lengths)
    ]
