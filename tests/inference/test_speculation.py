"""Drafted tokens are kept exactly where they are what would have been drawn."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from captures import again, captured_by, graphs_of, noted, on_graphs, use
from families import PROMPTS as TP_PROMPTS
from families import (
    answered,
    assert_same,
    assert_same_but_for_ties,
    engine,
    every_family,
    remember,
)
from quick import slow
from soft_graph import soft_capture
from test_tensor_parallel import SAMPLING, share_answers

from dschat.inference import SamplingParams
from dschat.inference.cuda_graphs import DecodeGraphs
from dschat.inference.sequence import Request
from dschat.inference.speculation import MAX_DRAFTED, Acceptance, AnswerHistory
from dschat.rlhf.rollout_policies import OpenPrompt, advance

PROMPTS = [[5, 6, 7], [9, 8, 9, 8, 9], [3], [4, 5, 6, 7] * 5]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
SLOW, OTHERS = pytest.mark.slow, ["opt", "bloom", "gpt2", "mistral"]


@every_family()
def test_answers_are_those_without_it(name, module_of):
    module = module_of(name)
    plain, drafting = engine(module), engine(module, speculate="history")
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=3)
    expected = plain.generate(PROMPTS, sampling)
    for changed in (0.0, 0.1):
        remember(drafting, PROMPTS, expected, changed)
        assert_same(drafting.generate(PROMPTS, sampling), expected)
        assert drafting.stats.accepted_tokens > 20
        assert drafting.stats.drafted_tokens >= drafting.stats.accepted_tokens
        assert drafting.stats.answer_tokens == expected.num_tokens
        assert drafting.stats.decode_steps < plain.stats.decode_steps
        assert drafting.cache.num_free == drafting.cache.num_pages
    assert drafting.stats.drafted_tokens > drafting.stats.accepted_tokens


@pytest.mark.parametrize("name", ["llama", *slow(["opt", "gpt2"])])
def test_bf16_answers_differ_in_ties_alone(name, module_of):
    module = module_of(name)
    plain, drafting = (
        engine(module, dtype=torch.bfloat16, speculate=s) for s in ("off", "history")
    )
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    expected = plain.generate(PROMPTS, sampling)
    remember(drafting, PROMPTS, expected, 0.1)
    assert_same_but_for_ties(drafting.generate(PROMPTS, sampling), expected, 0.05)
    assert drafting.stats.accepted_tokens > 10


def test_a_second_greedy_call_takes_few_steps(module_of):
    """Nothing is put into the history by hand here."""
    made = engine(module_of("llama"), speculate="history")
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    first = made.generate(PROMPTS[:1], sampling)
    again = made.generate(PROMPTS[:1], sampling)
    assert_same(again, first)
    assert made.stats.accepted_tokens >= 30
    assert made.stats.decode_steps <= 9


def test_a_stream_repeats_itself(module_of):
    """Greedy decoding with random weights soon runs in circles, which the draft follows."""
    made = engine(module_of("llama"), speculate="history", max_seq_len=64)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    plain = engine(module_of("llama"), max_seq_len=64)
    assert list(made.stream([3], sampling)) == list(plain.stream([3], sampling))
    assert made.stats.accepted_tokens > 10


def test_the_history_is_bounded():
    history = AnswerHistory(max_tokens=10)
    history.add([answered([1], [5, 6, 7]), answered([1], [5, 6]), answered([2], [4] * 4)])
    assert [list(a) for a in history.of([1])] == [[5, 6, 7], [5, 6]]
    history.add([answered([1], [8])])
    assert [list(a) for a in history.of([1])] == [[8]]
    assert history.num_tokens == 5
    history.add([answered([3], [9] * 6)])  # 11: the prompt that was answered longest ago goes
    assert history.of([2]) == []
    assert history.num_tokens == 7


def test_acceptance_is_that_of_the_place():
    """Of answers that begin as before every time, end as before half the time, and hardly ever come
    back after a wrong token.
    """
    acceptance = Acceptance()
    for i in range(400):
        for run in range(4):
            acceptance.add(True, run, run in (0, 2) or (run == 3 and i % 2 == 0))
    assert acceptance.chances(True, 0)[:3] == pytest.approx([1.0, 1.0, 0.5], abs=0.03)
    assert acceptance.chances(True, 1)[0] == pytest.approx(0.0, abs=0.03)
    assert acceptance.chances(True, 2)[:2] == pytest.approx([1.0, 0.5], abs=0.03)
    assert acceptance.chances(False, 2)[:2] == pytest.approx([0.7, 0.49])  # nothing is known
    chances = acceptance.chances(True, 16)
    assert len(chances) == 16
    assert sorted(chances, reverse=True) == chances


def test_a_sequence_is_in_the_places_that_chances_go_through(module_of, monkeypatch):
    """Of an answer that is right up to a token, wrong there, and right again."""
    made = engine(module_of("llama"), speculate="history")
    sampling = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
    (answer,) = engine(module_of("llama")).generate(PROMPTS[:1], sampling).token_ids
    other = answer[:3] + [answer[3] % 40 + 5] + answer[4:]
    made.speculation.history.add([answered(PROMPTS[0], other)])
    runs = noted(monkeypatch, Acceptance, "add")
    assert made.generate(PROMPTS[:1], sampling).token_ids == [answer]
    right = [(0, True), (2, True), (3, True), (4, False), (1, True), (2, True), (3, True)]
    assert [run[2:] for run in runs[: len(right)]] == right


def test_a_known_answer_is_computed_with_its_prompt(module_of):
    """All of it in the prefill of a single sample; not where all samples draw from one row."""
    made, plain = engine(module_of("llama"), speculate="history"), engine(module_of("llama"))
    sampling = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    for _ in range(40):  # it learns that earlier answers are right
        made.generate(PROMPTS, sampling)
    assert made.stats.decode_steps == 0
    assert made.stats.accepted_tokens == len(PROMPTS) * 11
    assert made.speculation.acceptance.chances(True, 0)[10] > 0.9
    assert_same(made.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))
    group = replace(sampling, n=3)
    assert_same(made.generate(PROMPTS, group), plain.generate(PROMPTS, group))
    assert made.stats.decode_steps > 0


@pytest.mark.parametrize("make", [engine, on_graphs])
def test_partial_rollouts_draft_nothing(make, module_of):
    """Which of them are complete would depend on earlier calls, which no checkpoint holds."""
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    left = []
    for mode in ("off", "history"):
        made = make(module_of("llama"), speculate=mode)
        for _ in range(2):
            made.generate(PROMPTS, sampling)
        opened = [OpenPrompt(ids) for ids in PROMPTS]
        advance(made, opened, sampling, list(range(len(PROMPTS))), wanted=1)
        left.append([prompt.token_ids for prompt in opened])
        assert made.stats.drafted_tokens == 0
    assert left[0] == left[1]


@pytest.mark.parametrize("mode", ["history", "auto"])
def test_answers_that_were_begun_go_on_without_new_prompts(mode, module_of):
    made = engine(module_of("llama"), speculate=mode)
    sampling = SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True)
    (expected,) = made.generate(PROMPTS[:1], sampling).token_ids
    request = Request(PROMPTS[0], sampling)
    request.resume([(expected[:4], [0.0] * 4, False)])
    core = made.core(drafts=True)
    core.add(request)
    assert [event.token for event in core.events()] == expected[4:]


def test_what_samples_have_in_common_is_learned_from_once(module_of, monkeypatch):
    """By the row that drew it, not again by those that part from it."""
    learned = noted(monkeypatch, Acceptance, "add")
    made = engine(module_of("llama"), speculate="history")
    sampling = SamplingParams(max_new_tokens=30, n=8, temperature=0.3, seed=3, ignore_eos=True)
    made.generate(PROMPTS, sampling)
    stats = made.stats
    assert len(learned) <= stats.decoded_rows + len(PROMPTS) + stats.accepted_tokens


def test_the_limit_of_a_prompt_may_be_above_the_samplings(module_of):
    made, plain = engine(module_of("llama"), speculate="history"), engine(module_of("llama"))
    short, limits = SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True), [20] * len(PROMPTS)
    expected = plain.generate(PROMPTS, short, max_new_tokens=limits)
    remember(made, PROMPTS, expected, 0.0)
    assert_same(made.generate(PROMPTS, short, max_new_tokens=limits), expected)
    assert made.stats.accepted_tokens > 20


def test_a_step_has_few_drafts(module_of):
    """200 prompts want three tokens each, of which a step takes 512."""
    sizes = {"speculate": "history", "max_num_seqs": 200, "max_num_batched_tokens": 2048}
    made, prompts = engine(module_of("llama"), **sizes), []
    for i in range(200):
        prompts.append([3 + i % 50, 3 + i // 50])
        made.speculation.history.add([answered(prompts[-1], [5] * 20)])
    core, drafted = made.core(drafts=True), [0]
    for number, ids in enumerate(prompts):
        core.add(Request(ids, SamplingParams(max_new_tokens=8, ignore_eos=True), number))
    while core.has_work:
        core.step()
        drafted.append(core.stats.drafted_tokens)
    assert max(b - a for a, b in itertools.pairwise(drafted)) == MAX_DRAFTED == 512


def test_auto_drafts_only_what_is_likely(module_of):
    """Half of an earlier answer's tokens are wrong: too many of them for ``auto``."""
    sampling, drafted = SamplingParams(max_new_tokens=20, n=2, seed=3, ignore_eos=True), {}
    expected = engine(module_of("llama")).generate(PROMPTS, sampling)
    for mode in ("history", "auto"):
        made = engine(module_of("llama"), speculate=mode)
        for changed in (0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0):
            remember(made, PROMPTS, expected, changed)
            assert_same(made.generate(PROMPTS, sampling), expected)
            drafted.setdefault(mode, []).append(made.stats.drafted_tokens)
    assert drafted["auto"][2] < 0.5 * drafted["history"][2]
    assert drafted["auto"][-1] > 100  # they have become better


@pytest.mark.parametrize(
    ("mode", "capture"),
    [("history", again), *slow([("auto", None), ("auto", again), ("history", None)])],
)
def test_tensor_parallel_ranks_draft_alike(mode, capture, module_of, monkeypatch):
    """Both have the answers of one engine that drafts nothing."""
    use(monkeypatch)

    def prepare(made):
        captured_by(made, capture)
        for _ in range(3):  # until earlier answers are known to be right
            made.generate(TP_PROMPTS if made.group.rank == 0 else [], SAMPLING)

    shares = [range(3), range(3, len(TP_PROMPTS))]
    _, engines = share_answers(module_of("llama"), shares, prepare, speculate=mode)
    assert all(made.stats.accepted_tokens > 50 for made in engines)
    assert engines[0].stats.drafted_tokens == engines[1].stats.drafted_tokens


# Captured steps of several positions


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=SLOW) for n in OTHERS)])
@pytest.mark.parametrize("capture", [again, *slow([soft_capture])])
def test_known_text_takes_few_steps(name, capture, monkeypatch, engines):
    plain, graphs = engines(name, capture, speculate="history", page_size=4)
    plain.speculation = None
    use(monkeypatch)
    expected = plain.generate(TP_PROMPTS[:2], GREEDY)
    remember(graphs, TP_PROMPTS[:2], expected, 0.0)
    assert_same(graphs.generate(TP_PROMPTS[:2], GREEDY), expected)
    assert graphs.stats.decode_steps <= 7
    assert graphs.stats.accepted_tokens >= 2 * 17
    assert not graphs_of(graphs).failed


def test_another_call_takes_the_rows_in_the_middle_of_a_stream(monkeypatch, module_of):
    use(monkeypatch)
    plain, made = (f(module_of("llama"), speculate="history") for f in (engine, on_graphs))
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=6, ignore_eos=True)
    expected, other = plain.generate([[3]], GREEDY), plain.generate(PROMPTS[:3], sampling)
    remember(made, [[3]], expected, 0.1)
    stream = made.stream([3], GREEDY)
    tokens = [next(stream) for _ in range(5)]
    assert_same(made.generate(PROMPTS[:3], sampling), other)
    assert tokens + list(stream) == expected.token_ids[0]


def test_widths_have_room_for_what_is_worth_it(monkeypatch, module_of):
    """The smallest step that takes the tokens worth a draft, on average over the rows."""
    use(monkeypatch)
    made = on_graphs(module_of("llama"), speculate="history")
    expected = made.generate(TP_PROMPTS[:2], GREEDY)
    for worth, width in ((0, 1), (1, 4), (3, 4), (4, 8), (16, 8)):
        chances = [1.0] * worth
        made.speculation.acceptance = SimpleNamespace(
            add=lambda *place: None, chances=lambda *place, found=chances: found
        )
        made.release_cache()
        widths, step = set(), DecodeGraphs.step

        def named(self, size, pages, kind, width, step=step, widths=widths):
            run = step(self, size, pages, kind, width)
            return lambda: (widths.add(width), run())

        with monkeypatch.context() as patch:
            patch.setattr(DecodeGraphs, "step", named)
            assert_same(made.generate(TP_PROMPTS[:2], GREEDY), expected)
        assert max(widths) == width


def test_large_batches_have_no_drafts(module_of):
    graphs = on_graphs(module_of("llama"), speculate="history").step_runner().graphs(50)
    assert [graphs.widths(size) for size in (1, 32, 64, 65)] == [[1, 4, 8]] * 2 + [[1, 4], [1]]
