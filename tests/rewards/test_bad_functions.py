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
P0 = "on the prompt 'p0'"
FIRST = "on 8 samples, the first on the prompt 'p0'"
ALL, LATER = range(8), range(4, 8)
# Function, reward_pool, samples that skip loses, pieces of the line in order, the last of them
# where the cause is one sample. The line ends with the remedy. Slow ones wait for a time limit.
BAD = [
    ("raises", "none", [4, 5], "raised KeyError: 'no such\\nkey'", P2),
    ("raises", "process", [4, 5], "raised KeyError: 'no such\\nkey'", P2),
    ("raises_what_cannot_be_shown", "none", ALL, "raised Silent", P0),
    ("raises_a_novel", "thread", ALL, "raised ValueError: word word", P0),
    ("hangs", "none slow", LATER, "did not return within 0.4 s", P2),  # no time for the later ones
    ("hangs", "thread", LATER, "did not return within 0.4 s", P2),
    ("hangs", "process slow", LATER, "did not return within 0.4 s", P2),
    ("is_slow", "none slow", None, "did not return within 0.4 s", FIRST),  # retried, some are not
    ("one_number", "none", ALL, "returned 1.0, not a list", P0),
    ("is_nan", "none", [4, 5], "returned nan", P2),
    ("is_nan", "process", [4, 5], "returned nan", P2),
    ("wrong_tokens", "none", [4, 5], "returned 9 values for an answer of 2 tokens", P2),
    ("forgets_await", "none", ALL, "returned a coroutine; declare", "async def", P0),
    ("exits", "none", [4, 5], "called sys.exit(3)", P2),
    ("exits", "process", [4, 5], "called sys.exit(3)", P2),
    ("only_alone", "none", [], "raised RuntimeError: too many", FIRST),  # retried, it works
    ("recursive", "none", ALL, "raised RecursionError", P0),
    ("with_signals", "none", ALL, "raised ValueError", "--reward_pool process", P0),
    ("dies", "process", [4, 5], "ended its process (exit code 7)", P2),
    ("is_killed", "process", [4, 5], "ended its process (SIGKILL)", P2),
    ("waits_for_ever", "none slow", LATER, "did not return within 0.4 s", P2),
    ("raises_later", "none", [4, 5], "raised KeyError", P2),
    ("blocks", "none slow", None, "blocks the event loop", P2),
    ("wants_more", "none", ALL, "needs the column tests", "(it has: none)", "@COLUMN"),
]
BAD_VALUES = {"is_nan", "wrong_tokens"}
RETRIED = ("raises", "hangs", "is_nan", "exits", "only_alone", "is_killed")
OVERRUN = {"hangs", "is_slow", "waits_for_ever", "blocks"}


def ask(rewards, samples, name, pool, **flags):
    workers = 1 if pool == "process" else 2  # 2 cut the samples in two
    flags |= {"reward_timeout_s": 0.4} if name in OVERRUN else {}
    asked = rewards(reward_fn=[f"{FILE}:{name}"], reward_pool=pool, reward_workers=workers, **flags)
    return asked.score(samples(8)).result()


def cases(bad, quick=()):
    """Of ``quick`` functions alone, if given, in the quick suite."""
    for name, pool, lost, *words in bad:
        pool, _, is_slow = pool.partition(" ")
        marks = [pytest.mark.slow] * (bool(is_slow) or name not in (quick or name))
        yield pytest.param(name, pool, lost, words, marks=marks, id=f"{name}-{pool}")


def check_line(line, name, words):
    """One line with ``words`` in their order; the remedy that it ends with."""
    assert len(line.splitlines()) == 1
    assert len(line) < 600
    at = 0
    for piece in words:
        assert piece in line[at:], line
        at = line.index(piece, at) + len(piece)
    assert ("raise --reward_timeout_s 0.4" in line) == ("within" in line or name == "blocks")
    return line[at:]


@pytest.mark.parametrize(("name", "pool", "lost", "words"), [*cases(BAD)])
def test_a_bad_function_is_one_line(rewards, samples, name, pool, lost, words):
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


@pytest.mark.parametrize(("name", "pool", "lost", "words"), [*cases(BAD, RETRIED)])
def test_skip_retries_sample_by_sample(rewards, samples, caplog, name, pool, lost, words):
    """One line names the cause and counts the samples, which alone lose their scores."""
    (source,) = ask(rewards, samples, name, pool, on_reward_error="skip")
    if lost is not None:
        expected = [math.nan if row in lost else 1.0 for row in range(8)]
        assert source.scores.tolist() == pytest.approx(expected, nan_ok=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (lost != [])
    for line in lines:
        assert f" of 8 samples have no score: --reward_fn {FILE}:{name} " in line
        assert lost is None or line.startswith(f"{len(lost)} of 8 ")
        assert "skip" not in line
        if words[-1] != FIRST:
            remedy = check_line(line, name, words)
            assert name == "wants_more" or remedy.endswith("fix it")


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


def test_functions_that_a_process_cannot_call(rewards):
    with pytest.raises(UserError, match="cannot run in another process .* --reward_pool thread"):
        rewards([lambda answers: [0.0]], reward_pool="process")
    with pytest.raises(UserError, match="takes obj by position"):
        rewards([len])
