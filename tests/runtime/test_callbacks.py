"""Hooks of a run: when they are called, what they change, and what happens where they fail."""

import pytest

from dschat.config import UserError
from dschat.runtime.start import EVENTS, Callbacks

FILE = """
class Recorder:
    def on_rollout(self, calls, experience):
        calls.append("on_rollout")

    def on_end(self, calls):
        calls.append("on_end")


class Broken:
    def on_step(self, trainer, metrics):
        raise ValueError("no disk\\nleft")


class Misspelled:
    def on_evaluation(self, trainer, metrics):
        pass


class NeedsMore:
    def __init__(self, path):
        pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks.py").write_text(FILE)


def test_hooks_are_called_in_order(file):
    calls = []  # in the trainer's place

    class Own:
        def on_rollout(self, trainer, experience):
            trainer.append(experience)

    call = Callbacks(["hooks.py:Recorder"], [Own], "error")
    for event in EVENTS:
        call(event, calls, *([] if event == "on_end" else ["what"]))
    assert calls == ["on_rollout", "what", "on_end"]


@pytest.mark.parametrize("on_error", ["error", "log"])
def test_one_that_raises(file, on_error, caplog):
    call = Callbacks(["hooks.py:Broken"], [], on_error)
    said = "--callback hooks.py:Broken: on_step raised ValueError: no disk left"
    if on_error == "log":
        call("on_step", None, {})
        assert said in caplog.text
    else:
        with pytest.raises(UserError, match=f"^{said}; --on_callback_error log goes on$"):
            call("on_step", None, {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Misspelled", "no hook is called on_evaluation; did you mean on_evaluate"),
        ("NeedsMore", "cannot be made without arguments: it raised TypeError"),
    ],
)
def test_mistakes(file, name, words):
    with pytest.raises(UserError, match=f"--callback hooks.py:{name}.*{words}"):
        Callbacks([f"hooks.py:{name}"], [], "error")
