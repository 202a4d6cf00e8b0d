"""The console: lines that are held back until the checks of a step have passed."""

import logging
import time
import warnings

import pytest

from dschat.observability import console


@pytest.fixture
def dschat_logger():
    """The logger of the package, restored after the test."""
    logger, state = console.logger, vars(console.logger).copy()
    logger.handlers = []
    yield logger
    vars(logger).update(state)


def test_held_lines_wait_for_release(dschat_logger, capsys):
    console.setup(hold=True)
    dschat_logger.info("one")
    assert capsys.readouterr().err == ""
    console.release()
    dschat_logger.info("two")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two"]


def test_warnings_are_marked(dschat_logger, capsys):
    """Once each, with more than one handler too."""
    console.setup()
    dschat_logger.addHandler(dschat_logger.handlers[0])
    other = logging.StreamHandler()
    other.setFormatter(dschat_logger.handlers[0].formatter)
    dschat_logger.addHandler(other)
    dschat_logger.info("one %d", 1)
    dschat_logger.warning("two %d", 2)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["one 1"] * 2 + ["warning: two 2"] * 2


def test_held_lines_are_printed_after_a_while(capsys):
    handler, latest, printed = console._TqdmHandler(), time.monotonic() + 60, ""
    handler.hold(0.05)
    handler.handle(logging.makeLogRecord({"msg": "one"}))
    while "\n" not in printed and time.monotonic() < latest:
        time.sleep(0.01)
        printed += capsys.readouterr().err
    assert printed == "one\n"


def test_what_a_terminal_would_execute_or_reorder_is_escaped():
    marks = [*range(32), *range(0x7F, 0xA0), 0x200E, 0x200F]
    marks += [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    for code in marks:
        assert console.printable(f"a{chr(code)}b").isprintable() != (chr(code) in "\n\t")
    kept = "שלום, naïve 日本 👩\u200d👧 \\x1b\n\tx"
    assert console.printable(kept) == kept


def test_log_lines_are_printable(dschat_logger, capsys):
    """A name in somebody's data set or folder may be anything; our own tables have colors."""
    console.setup()
    logging.getLogger("dschat").info("%s\n\ttext", "\x1b]0;title\x07")
    logging.getLogger("dschat").info("\x1b[1mtable", extra={"is_styled": True})
    printed = capsys.readouterr().err
    assert "\\x1b]0;title\\x07\n\ttext\n" in printed
    assert "\x1b[1mtable" in printed


def test_a_record_is_one_line_of_a_file(dschat_logger, capsys):
    console.setup()
    dschat_logger.info("word " * 40)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_line_of_metrics():
    """By hand: six characters a value, with as many digits as they hold."""
    metrics = {
        "a/scores": -0.34621,
        "kl": -1.39e-07,
        "perplexity": 1017.4,
        "b/x": 123456.0,
        "c/x": 0,
        "tokens": 12345.6,
        "rate": 9.65e-06,
        "decay": 0.00015,
    }
    line = console.format_line("held out", 5, 12, metrics, [*metrics, "d"])
    assert line == (
        "held out  5/12  score -0.346  kl -1e-7   perplexity 1017    b/x 1.2e+5  c/x 0       "
        "tokens 12346   rate 9.7e-6  decay 1.5e-4"
    )


def test_training_lines_of_step_3_fit(dschat_logger):
    from dschat.rlhf.reporter import _COLUMNS

    columns = {name: -1.234e-12 for name in _COLUMNS if "teacher" not in name}
    line = console.format_line("step", 1000, 1000, columns, _COLUMNS)
    assert len("12:34:56 " + line + "  eta 12:34:56") <= 120


@pytest.mark.parametrize("done", [0, 30])
def test_the_time_left_without_a_terminal(done, monkeypatch):
    """By the steps since the start, or since it was resumed."""
    bar = console.progress(50, "training", done=done)
    bar.start_t -= 100.0
    assert console.eta(bar) == ""
    bar.update(5)
    left = 100 / 5 * (50 - done - 5)  # 900 or 300 s
    assert console.eta(bar) in (f"  eta {left // 60:02.0f}:{n:02}" for n in (0, 1))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert console.eta(bar) == ""  # the bar shows it
    monkeypatch.undo()
    bar.update(45 - done)
    assert console.eta(bar) == ""
    assert bar.fp.getvalue() == ""
    bar.close()


def test_deprecations_among_libraries_are_not_shown(dschat_logger):
    with warnings.catch_warnings(record=True) as caught:
        console.setup()
        for module in ("transformers.modeling_utils", "peft.mapping_func", "deepspeed.comm"):
            warnings.warn_explicit("old name", FutureWarning, "theirs.py", 1, module)
        warnings.warn_explicit("old name", FutureWarning, "mine.py", 1, "my_reward")
    assert [warning.filename for warning in caught] == ["mine.py"]
