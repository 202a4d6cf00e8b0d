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


def test_deprecations_among_libraries_are_not_shown(dschat_logger):
    with warnings.catch_warnings(record=True) as caught:
        console.setup()
        for module in ("transformers.modeling_utils", "peft.mapping_func", "deepspeed.comm"):
            warnings.warn_explicit("old name", FutureWarning, "theirs.py", 1, module)
        warnings.warn_explicit("old name", FutureWarning, "mine.py", 1, "my_reward")
    assert [warning.filename for warning in caught] == ["mine.py"]
