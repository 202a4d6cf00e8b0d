"""Progress of answers: lines without a terminal."""

import pytest

from dschat.offline.rows import Progress


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_without_a_terminal_is_logged(is_terminal, monkeypatch, caplog):
    """Every half minute; a terminal has a bar."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    caplog.set_level("INFO", "dschat")
    progress = Progress(total=30, done=10, description="answers")
    progress._started = progress._logged = progress._started - 31.0
    progress.advance(prompts=5, tokens=62)
    progress.advance(prompts=5, tokens=62)
    progress.close()
    line = "answers: 15 of 30 prompts, 2 tokens/s, 93 s left"
    assert caplog.messages == ([] if is_terminal else [line])
