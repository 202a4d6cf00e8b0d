"""Progress of answers: lines without a terminal."""

import pytest

from dschat.offline.rows import Progress


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_without_a_terminal_is_logged(is_terminal, monkeypatch, caplog):
    """Every half minute; a terminal has a bar."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    caplog.set_level("INFO", "dschat")
    progress = Progress(total=30, done=10)
    progress._bar.start_t -= 31.0
    progress._logged -= 31.0
    progress.advance(prompts=5, tokens=62)
    progress.advance(prompts=5, tokens=62)
    progress.close()
    line = "generate: 15 of 30 prompts, 2 tokens/s  eta 01:34"
    assert progress.line() == "generate: 20 of 30 prompts, 4 tokens/s"
    assert caplog.messages == ([] if is_terminal else [line])
