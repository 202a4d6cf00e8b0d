"""Stop strings over any tokens, against a search of the whole text."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import AnswerText, Event, Token
from dschat.openai_api.generation import Generation
from dschat.openai_api.responses import ChatFormat

PIECES = ["a", "b", "ab", "ba", "é", "aab", " "]
END = len(PIECES)


class Tokenizer:
    """A token is a piece of text; the last one is an end token."""

    unk_token_id = None

    def __call__(self, texts, **_):
        return {"input_ids": [[*map(ord, text)] for text in texts]}

    def decode(self, ids, **_):
        return "".join(PIECES[token] for token in ids if token != END)


def answer(tokens, stops, reason):
    """The pieces of ``tokens``, and why it ended, at which token."""
    text = AnswerText(Tokenizer(), stops, frozenset({END}))
    pieces = []
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        drawn = Token(SimpleNamespace(), 0, token, 0.0, [], reason if last else None)
        piece, found = text.push(drawn)
        pieces.append(piece)
        if found is not None:
            break
    return pieces, found, i


@example([PIECES.index("aab")], ["b", "a"], False)  # one token completes both
@given(
    st.lists(st.integers(0, END - 1), min_size=1, max_size=20),
    st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_the_text_ends_before_the_first_stop_string(tokens, stops, has_end):
    tokens = [*tokens, END] if has_end else tokens
    pieces, found, last = answer(tokens, stops, "stop" if has_end else "length")
    got = "".join(pieces)
    for end in range(1, len(tokens) + 1):  # the token that completes a stop string
        whole = Tokenizer().decode(tokens[:end])
        starts = [whole.index(stop) for stop in stops if stop in whole]
        if starts:
            assert (got, found, last) == (whole[: min(starts)], "stop", end - 1)
            return
    assert (got, found) == (Tokenizer().decode(tokens), "stop" if has_end else "length")


def test_what_may_begin_a_stop_string_waits():
    tokens = [PIECES.index(piece) for piece in ("a", "a", "b", " ")]
    pieces, _, _ = answer(tokens, ["aaa", "b "], "length")
    assert pieces == ["", "", "aa", ""]


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_text_is_not_held_without_need(stops):
    tokens = [PIECES.index(piece) for piece in ("a", "b", "a")]
    assert answer(tokens, stops, "length")[0] == ["a", "b", "a"]


def followed(drawn, stops, n=1):
    """The events of a request whose ``drawn`` tokens (sample, piece, reason) come, the count of its
    tokens, and what of it is cancelled.
    """
    handle, cancelled = object(), []

    def submit(tokens, request):
        for sample, piece, reason in drawn:
            token = Token(handle, sample, PIECES.index(piece), 0.0, [], reason)
            tokens.put_nowait(token)
        return handle

    engine = SimpleNamespace(problem=lambda entries: None, stop_ids=())
    worker = SimpleNamespace(engine=engine, submit=submit, cancel=lambda *a: cancelled.append(a))
    model = SimpleNamespace(worker=worker, tokenizer=Tokenizer(), name="")

    async def follow():
        began = time.perf_counter()
        answers = Generation(model, [Request([1], SamplingParams(n=n))], stops, began)
        events = [event async for some in answers.events(60.0) for event in some]
        return events, answers.completion_tokens

    return (*asyncio.run(follow()), [answer for of, *answer in cancelled if of is handle])


def test_an_answer_that_met_a_stop_string_is_cancelled_and_takes_no_more_tokens():
    """Those that were drawn meanwhile are in neither its text nor the count."""
    drawn = [(0, "a", None), (0, "b", None), (1, "b", None), (0, " ", None), (1, "a", "length")]
    events, count, cancelled = followed(drawn, ["ab"], n=2)
    assert [(e.choice, e.text, e.finish_reason) for e in events] == [
        *((0, "", None), (0, "", "stop"), (1, "b", None), (1, "a", "length"))
    ]
    assert count == 4
    assert cancelled[0] == [0]


def test_an_echo_that_ends_within_its_prompt_has_drawn_no_tokens():
    """Not less than none, which no counter takes."""
    engine = SimpleNamespace(problem=lambda entries: None, stop_ids=())
    worker = SimpleNamespace(engine=engine, submit=lambda *_: object())
    model = SimpleNamespace(worker=worker, tokenizer=Tokenizer())
    request = Request([1], SamplingParams(), forced=[2, 3])
    assert Generation(model, [request], [], 0.0, echoes=True).completion_tokens == 0


def test_a_chunk_without_text_has_an_empty_delta():
    generation = SimpleNamespace(model_name="m", tokenizer=Tokenizer(), num_choices=1)
    answers = ChatFormat(generation, has_logprobs=False)
    end = Event(0, "", Token(SimpleNamespace(), 0, END, 0.0, [], "stop"), "stop", 3)
    (choice,) = answers.chunk([end])["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "stop")


@pytest.mark.parametrize("stops", [[], ["aaab x", "b bz"]])
def test_an_offset_is_where_the_tokens_own_text_begins(stops):
    """Also while that text is held back."""
    pieces = ["a", "aab", " ", "b", "a", "é"]
    reasons = [None] * 5 + ["length"]
    events, _, _ = followed([(0, *pair) for pair in zip(pieces, reasons, strict=True)], stops)
    assert [event.offset for event in events] == [0, 1, 4, 5, 6, 7]
