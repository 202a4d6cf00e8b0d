"""Failing functions: the error is one line with function, cause and prompt; with
``--on_reward_error skip`` calls are retried sample by sample, and only the failed samples lose
their scores.
"""

import math
import signal
import threading
import time
from pathlib import Path

import pytest

from dschat.config import UserError
from dschat.rewards.scoring import RewardError

FILE = Path(__file__).with_name("bad_functions.py")
P2 = "on the prompt 'p2'"
FIRST = "on 8 samples, the first on the prompt 'p0'"
# Function, reward_pool, and pieces of the line in order, the last of them where the cause is one
# sample. The line ends with the remedy.
BAD = [
    ("raises", "none", "raised KeyError: 'no such\\nkey'", P2),
    ("raises", "process", "raised KeyError: 'no such\\nkey'", P2),
    ("raises_what_cannot_be_shown", "none", "raised Silent", "on the prompt 'p0'"),
    ("raises_a_novel", "thread", "raised ValueError: word word", "on the prompt 'p0'"),
    ("hangs", "none", "did not return within 1 s", P2),
    ("hangs", "thread", "did not return within 1 s", P2),
    ("hangs", "process", "did not return within 1 s", P2),
    ("is_slow", "none", "did not return within 1 s", FIRST),  # retried, some are not
    ("one_too_few", "none", "returned ", " values for ", "on the prompt 'p0'"),
    ("one_number", "none", "returned 1.0, not a list", "on the prompt 'p0'"),
    ("nothing", "none", "returned None, not a list", "on the prompt 'p0'"),
    ("lazily", "none", "returned a generator, not a list", "on the prompt 'p0'"),
    ("by_name", "none", "returned a dict, not a list", "on the prompt 'p0'"),
    ("is_nan", "none", "returned nan", P2),
    ("is_nan", "process", "returned nan", P2),
    ("is_infinite", "none", "returned inf", P2),
    ("beyond_floats", "none", "returned 1e+300, which is too large", P2),
    ("is_text", "none", "returned '0.5', not a number", P2),
    ("wrong_tokens", "none", "returned 9 values for an answer of 2 tokens", P2),
    ("nan_token", "none", "returned nan for a token", "on the prompt 'p0'"),
    ("forgets_await", "none", "returned a coroutine; declare", "async def", "on the prompt 'p0'"),
    ("exits", "none", "called sys.exit(3)", P2),
    ("exits", "process", "called sys.exit(3)", P2),
    ("only_alone", "none", "raised RuntimeError: too many", FIRST),
    ("recursive", "none", "raised RecursionError", "on the prompt 'p0'"),
    ("with_signals", "none", "raised ValueError", "--reward_pool process", "on the prompt 'p0'"),
    ("dies", "process", "ended its process (exit code 7)", P2),
    ("is_killed", "process", "ended its process (SIGKILL)", P2),
    ("keeps_the_interpreter", "process", "did not return within 1 s", P2),
    ("waits_for_ever", "none", "did not return within 1 s", P2),
    ("raises_later", "none", "raised KeyError", P2),
    ("blocks", "none", "blocks the event loop", P2),
    ("wants_more", "none", "needs the column tests", "(it has: none)", "@COLUMN"),
]


BAD_VALUES = {"is_nan", "is_infinite", "beyond_floats", "is_text", "wrong_tokens", "nan_token"}
OVERRUN = {"hangs", "is_slow", "keeps_the_interpreter", "waits_for_ever", "blocks"}


def ask(rewards, samples, name, pool, **flags):
    workers = 1 if pool == "process" else 2  # 2 cut the samples in two
    flags |= {"reward_timeout_s": 1.0} if name in OVERRUN else {}
    asked = rewards(reward_fn=[f"{FILE}:{name}"], reward_pool=pool, reward_workers=workers, **flags)
    return asked.score(samples(8)).result()


SLOW = [  # they wait for a timeout, as others do
    *(("hangs", "none"), ("hangs", "process"), ("is_slow", "none")),
    ("keeps_the_interpreter", "process"),
    *(("waits_for_ever", "none"), ("blocks", "none")),
]


def slow(name, pool, expected):
    marks = [pytest.mark.slow] * ((name, pool) in SLOW)
    return pytest.param(name, pool, expected, marks=marks)


def check_line(line, name, words):
    """One line with ``words`` in their order; the remedy that it ends with."""
    assert len(line.splitlines()) == 1
    assert len(line) < 600
    at = 0
    for piece in words:
        assert piece in line[at:], line
        at = line.index(piece, at) + len(piece)
    assert ("raise --reward_timeout_s 1" in line) == ("within" in line or name == "blocks")
    return line[at:]


@pytest.mark.parametrize(("name", "pool", "words"), [slow(n, p, w) for n, p, *w in BAD])
def test_a_bad_function_is_one_line(rewards, samples, name, pool, words):
    """A call that fails as a whole names its samples; an invalid value is one sample's."""
    started = time.monotonic()
    with pytest.raises(RewardError) as caught:
        ask(rewards, samples, name, pool)
    line, *cause = str(caught.value), *words[:-1]
    assert line.startswith(f"--reward_fn {FILE}:{name} ")
    if name == "wants_more":
        where = words[-1]
    elif name in BAD_VALUES:
        where = f" {words[-1]}; "
    elif pool == "thread":  # 2 parts
        where = f" on 4 samples, the first {words[-1]}; "
    else:
        where = f" {FIRST}; "
    remedy = check_line(line, name, [*cause, where])
    assert name == "wants_more" or remedy.endswith("fix it, or pass --on_reward_error skip")
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("name", "pool", "words"), [slow(n, p, w) for n, p, *w in BAD if w[-1] != FIRST]
)
def test_skip_retries_sample_by_sample_and_names_one(rewards, samples, caplog, name, pool, words):
    ask(rewards, samples, name, pool, on_reward_error="skip")
    (record,) = caplog.records
    line = record.getMessage()
    assert f" of 8 samples have no score: --reward_fn {FILE}:{name} " in line
    remedy = check_line(line, name, words)
    assert name == "wants_more" or remedy.endswith("fix it")


@pytest.mark.parametrize(
    ("name", "pool", "lost"),
    [
        ("raises", "none", [4, 5]),
        ("raises", "process", [4, 5]),
        ("is_nan", "none", [4, 5]),
        ("wrong_tokens", "none", [4, 5]),
        ("dies", "process", [4, 5]),
        ("only_alone", "none", []),  # retried one sample at a time, it works
        ("one_number", "none", range(8)),
        slow("hangs", "none", range(4, 8)),  # it used up the time of all later samples
        pytest.param("hangs", "thread", range(4, 8), marks=pytest.mark.slow),
    ],
)
def test_skip_drops_only_the_failed_samples(rewards, samples, caplog, name, pool, lost):
    (source,) = ask(rewards, samples, name, pool, on_reward_error="skip")
    expected = [math.nan if row in lost else 1.0 for row in range(8)]
    assert source.scores.tolist() == pytest.approx(expected, nan_ok=True)
    messages = [record.getMessage() for record in caplog.records]
    (line,) = messages or [f"{name} "]  # one line, however many samples it lost
    assert name in line
    assert not lost or line.startswith(f"{len(lost)} of 8 samples have no score: --reward_fn")
    assert "skip" not in line


def test_a_function_that_changes_its_arguments_affects_no_other(rewards, samples):
    def vandal(answers, answer_ids, finish_reasons, reference):
        count = len(answers)
        for values in (answers, finish_reasons, reference):
            values.clear()
        for ids in answer_ids:
            ids.append(7)
        return [0.0] * count

    def honest(answers, answer_ids, reference):
        rows = zip(answers, answer_ids, reference, strict=True)
        return [float(len(ids) + (answer == right)) for answer, ids, right in rows]

    given = samples(4, reference=["a0", "a1", "", "a3"])
    asked = rewards([vandal, honest])
    scores = asked.score(given).result()[1].scores
    assert scores.tolist() == [2, 3, 3, 2]
    assert given.answer_ids == samples(4).answer_ids


def test_keyboard_interrupt_passes_through(rewards, samples):
    """Ctrl-C reaches the main thread while the function's thread is busy."""
    main, over = threading.main_thread().ident, threading.Event()

    def interrupted(prompts):
        signal.pthread_kill(main, signal.SIGINT)
        over.wait(50)

    asked = rewards([interrupted])
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asked.score(samples(2))
    over.set()
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("function", [lambda answers: [0.0], len])
def test_a_function_that_cannot_be_pickled_is_refused_for_processes(rewards, function):
    if function is len:  # a builtin can be pickled, but takes its argument by position
        with pytest.raises(UserError, match="takes obj by position"):
            rewards([function])
        return
    with pytest.raises(UserError, match="cannot run in another process .* file.py:name"):
        rewards([function], reward_pool="process")
