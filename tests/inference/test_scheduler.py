"""The scheduler and the page pool, on random rollouts (`played_schedules`) and by hand."""

import pytest
from families import examples
from hypothesis import given
from hypothesis import strategies as st
from played_schedules import MAX_SEQ_LEN, Case, Run, cases


@examples(25, 5000)
@given(cases())
def test_every_sequence_finishes_once_and_no_page_is_lost(case):
    run = Run(case).to_the_end()
    assert run.scheduler.stats.peak_pages <= case.num_pages


@examples(20, 500)
@given(cases(), st.randoms(use_true_random=False))
def test_a_second_call_continues_answers_of_the_first(case, random):
    """Its prompts start like the sequences of the first call, and are as long as the cache lets."""
    case.keeps_prefixes, case.has_states = True, False
    run = Run(case).to_the_end()
    texts = [
        [case.token(number, 7, i) for i in range(case.prompt_lengths[number])] + list(answer)
        for number, _, answer in run.finished
    ]
    longest = max(map(len, texts))
    run.call([random.choice(texts)[: longest - max(each)] for each in case.answer_lengths])
    run.to_the_end()


@examples(8, 500)
@given(cases())
def test_the_same_prompts_make_the_same_plans(case):
    """The ranks of a tensor-parallel group rely on it."""
    assert Run(case).to_the_end().trace == Run(case).to_the_end().trace


@examples(12, 500)
@given(cases(), st.integers(0, 12))
def test_giving_up_frees_every_page_and_leaves_nothing_behind(case, steps):
    run = Run(case).until(steps)
    run.scheduler.clear()
    assert run.cache.num_free == case.num_pages
    assert not run.scheduler.has_work
    run.ask(run.texts)
    run.to_the_end()


@examples(20, 500)
@given(cases(), st.randoms(use_true_random=False))
def test_what_is_dropped_changes_no_other_answer(case, random):
    run = Run(case)
    while run.scheduler.has_work:
        if random.random() < 0.4:
            prompt = random.choice(run.prompts)
            run.drop(prompt, random.choice([None, *range(len(prompt.sequences))]))
        run.until(run.steps + 1)
    run.to_the_end()


@examples(12, 500)
@given(cases())
def test_a_prompt_is_computed_once_where_there_is_room(case):
    n = len(case.answer_lengths[0])
    case.num_pages = -(-MAX_SEQ_LEN // case.page_size) * (n + 1) * len(case.prompt_lengths)
    run = Run(case).to_the_end()
    assert run.scheduler.stats.preemptions == 0
    assert run.prefilled + run.scheduler.stats.cached_tokens == sum(case.prompt_lengths)
    assert case.keeps_prefixes or not run.scheduler.stats.cached_tokens


# By hand


def test_held_prompts_give_way_when_nothing_else_can_run():
    """Both firsts end while all pages are kept for samples that wait: nobody runs, none is free."""
    Run(Case([3, 3], [[1, 3], [1, 3]], 1, 6, 6, 100)).to_the_end()


def test_the_newest_sequence_makes_room_and_comes_back_first():
    case = Case(
        [4, 4, 1],
        [[6], [6], [1]],
        page_size=2,
        num_pages=6,
        max_num_seqs=2,
        max_num_batched_tokens=99,
    )
    run = Run(case)
    run.step()  # both prompts in, two pages each
    assert [entry[0] for entry in run.trace[0]] == [0, 1]
    while run.scheduler.stats.preemptions == 0:
        run.step()
    assert [entry[0] for entry in run.trace[-1]] == [0]  # the older one continues alone
    run.to_the_end()
    assert run.scheduler.stats.preemptions == 1
    # Once there is room, 1 comes before 2, with its prompt and answer so far in one piece.
    assert [entry[0] for entry in run.trace[6]] == [2, 1]
    assert [entry[3] for entry in run.trace[6]] == [1, 4 + 3]


def test_a_prompt_leaves_the_page_that_a_running_sequence_needs_next():
    """Two of five pages each; the first sequence needs the fifth in the next step."""
    run = Run(Case([8, 7, 4], [[6], [2], [2]], 4, 5, 4, 99)).to_the_end()
    assert [len(step) for step in run.trace[:2]] == [2, 2]
    assert run.scheduler.stats.preemptions == 0


def test_long_prompts_come_in_pieces_beside_those_that_decode():
    case = Case(
        [14, 3], [[2], [8]], page_size=4, num_pages=12, max_num_seqs=2, max_num_batched_tokens=5
    )
    run = Run(case).to_the_end()
    counts = [[(entry[0], entry[3]) for entry in entries] for entries in run.trace]
    assert counts[:3] == [[(0, 5)], [(0, 5)], [(1, 1), (0, 4)]]
    assert all(sum(count for _, count in step) <= 5 for step in counts)


def test_prompts_take_no_pages_before_a_step_has_room_for_them():
    """Four tokens a step, each time those of the next prompt; its page is the last one's."""
    run = Run(Case([4, 4, 4], [[1]] * 3, 8, 9, 3, 4)).to_the_end()
    assert [len(step) for step in run.trace] == [1, 1, 1]
    assert run.scheduler.stats.peak_pages == 1


def test_samples_share_the_whole_pages_of_their_prompt():
    case = Case(
        [9], [[4, 4, 4]], page_size=4, num_pages=18, max_num_seqs=3, max_num_batched_tokens=99
    )
    run = Run(case).until(2)
    pages = [entry[2] for entry in run.trace[1]]
    assert [p[:2] for p in pages] == [pages[0][:2]] * 3
    assert len({p[2] for p in pages}) == 3  # the page it ends in: one each
    assert run.cache.num_free == 18 - 5
    run.to_the_end()
    assert run.prefilled == 9


def test_samples_are_one_row_as_long_as_their_answers_are_the_same():
    """The same tokens, of 2, 4 and 6: one row, which the shorter ones leave."""
    case = Case([3], [[2, 4, 6]], 4, 9, 3, 99, vocabulary=1)
    run = Run(case).until(1)
    copied = []
    run.cache.copy_page = lambda *args: copied.append(args)
    run.to_the_end()
    assert [len(step) for step in run.trace] == [1] * 6
    assert not copied
    case.samples_apart = True
    assert [len(step) for step in Run(case).to_the_end().trace] == [1, 3, 2, 2, 1, 1]


def test_a_row_goes_on_without_its_first_sample():
    """Dropped in the middle of a prompt of 6, and while it decodes: nothing is computed again."""
    case = Case([6], [[6, 6, 6]], 4, 9, 3, 4, agree=8)
    run = Run(case)
    for steps in (1, 3):
        run.until(steps).drop(run.prompts[0], steps // 2)
    run.to_the_end()
    assert [entry[3] for step in run.trace for entry in step] == [4, 2, 1, 1, 1, 1, 1]
    assert [answer[:2] for answer in run.finished] == [(0, 2)]


def test_whole_sequence_pages_stay_in_front_once_nobody_waits():
    """Then a decode batch is a plain slice of the cache."""
    case = Case([5, 4, 3, 2], [[2], [3], [8], [9]], MAX_SEQ_LEN, 4, 4, 99)
    run = Run(case).to_the_end()
    for entries in run.trace[1:]:
        assert [entry[2] for entry in entries] == [[i] for i in range(len(entries))]


# Prefixes


def prefix_case(lengths, separate=False):
    """All tokens are the same one: prompts differ in length only. Pages of 4."""
    answers = [[2]] * len(lengths)
    return Case(lengths, answers, 4, 60, 8, 99, separate, vocabulary=1, keeps_prefixes=True)


@pytest.mark.parametrize("separate", [False, True])
def test_prompts_wait_for_the_prefix_that_one_of_them_computes(separate):
    """The longest computes its 13 tokens, three pages; then all start behind what they share."""
    run = Run(prefix_case([13, 13, 9, 8, 3], separate)).to_the_end()
    counts = {number: count for step in run.trace[1::-1] for number, _, _, count in step}
    assert [entry[0] for entry in run.trace[0]] == [0]
    assert [counts[i] for i in range(1, 5)] == [1, 1, 4, 3]  # the last token is always computed
    assert run.scheduler.stats.cached_tokens == 12 + 8 + 4


def test_prompts_wait_for_a_row_that_goes_on_without_its_first_sample():
    """8 of 13 tokens are computed when that is dropped; then the others wait for the third page."""
    case = prefix_case([13, 13])
    case.answer_lengths, case.max_num_batched_tokens = [[2, 2], [2]], 8
    run = Run(case).until(1)
    run.drop(run.prompts[0], 0)
    assert run.to_the_end().prefilled == 13 + 1


def test_a_prompt_that_was_dropped_leaves_what_it_had_computed():
    """8 of its 13 tokens: the others compute the rest, and do not find it."""
    case = prefix_case([13, 13])
    case.max_num_batched_tokens = 8
    run = Run(case).until(1)
    run.drop(run.prompts[0])
    assert run.to_the_end().prefilled == 8 + 5


def test_an_answer_that_was_dropped_is_found_as_far_as_it_was_computed():
    case = prefix_case([4])
    case.answer_lengths = [[9]]
    run = Run(case).until(6)  # 4 tokens of the prompt and 5 of the answer
    run.scheduler.drop(run.prompts[0])
    assert len(run.cache.find([case.token(0, 7, 0)] * 20)[0]) == 2


def test_a_later_call_finds_the_pages_of_an_earlier_one():
    """A conversation: the second prompt is the first with its answer, and three tokens more."""
    case = prefix_case([9])
    case.answer_lengths = [[7]]
    run = Run(case).to_the_end()
    case.answer_lengths = [[4]]
    # The last of 9 + 7 tokens was drawn and not computed: three pages.
    for count in (20 - 12, 20):
        run.call([[case.token(0, 0, 0)] * 20])
        run.step()
        assert run.trace[-1][0][3] == count
        run.scheduler.clear()
        run.cache.forget()


def test_a_page_is_not_found_any_more_when_another_sample_writes_to_it():
    """One slot: the first sample fills a page of four, the second then writes its third token."""
    case = Case([2], [[6, 2]], 4, 3, 1, 99, keeps_prefixes=True)
    run = Run(case).to_the_end()
    text = [case.token(0, 7, 0), case.token(0, 7, 1), *(case.token(0, 0, i) for i in range(6))]
    assert run.cache.find(text[:4])[0] == []
    case.answer_lengths = [[2]]
    run.call([text])
    run.to_the_end()


def test_answers_of_several_samples_are_found_later():
    """A prompt of 3 and six common tokens, then each its own: 16 of 17 tokens were computed."""
    case = Case([3], [[14, 14]], 4, 20, 2, 99, keeps_prefixes=True, agree=6)
    run = Run(case).to_the_end()
    for number, _, answer in run.finished:
        text = run.prompts[number].ids + list(answer)
        assert len(run.cache.find(text)[0]) == 4


def test_slots_are_filled_where_samples_wait_for_pages():
    """A page each: a sample that waits goes on in the page of one that has ended."""
    case = Case(
        [3] * 16, [[4 + (5 * i + j) % 7 for j in range(4)] for i in range(16)], 24, 16, 16, 99
    )
    run = Run(case).to_the_end()
    assert run.prefilled == 3 * 16
    filled = [len(step) for step in run.trace[:-12]]
    assert sum(filled) > 0.9 * 16 * len(filled)


def test_separate_prompts_are_admitted_in_groups():
    """16 sequences run and one ends in each step; the other 16 prompts come two at a time."""
    lengths = [[2 + i % 16] for i in range(32)]
    case = Case([3] * 32, lengths, MAX_SEQ_LEN, 16, 16, 99, separate_prefill=True)
    run = Run(case).to_the_end()
    groups = [len(step) for step in run.trace if step[0][3] > 1]
    assert sum(groups) == 32
    assert groups[0] == 16
    assert min(groups[1:]) >= 2
