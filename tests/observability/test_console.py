"""The console: lines that are held back until the checks of a step have passed."""

import logging

import pytest

from dschat.observability import console


@pytest.fixture
def dschat_logger():
    """The logger of the package, restored after the test."""
    logger, state = console.logger, vars(console.logger).copy()
    logger.handlers = []
    yield logger
    vars(logger).update(state)


def test_held_lines_wait_for_release(dschat_logger, monkeypatch, capsys):
    monkeypatch.setattr(console, "_NOISY", ())
    console.setup(hold=True)
    dschat_logger.info("one")
    assert capsys.readouterr().err == ""
    console.release()
    dschat_logger.info("two")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two"]


def test_held_lines_are_printed_after_a_while(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(console.threading.Timer, "start", lambda timer: started.append(timer))
    handler = console._TqdmHandler()
    handler.hold(5.0)
    handler.handle(logging.makeLogRecord({"msg": "one"}))
    (timer,) = started
    assert timer.interval == 5.0
    assert capsys.readouterr().err == ""
    timer.function()
    assert capsys.readouterr().err == "one\n"
