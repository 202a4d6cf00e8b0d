"""chat.py as a process: lines through a pipe, and a conversation on a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from python_process import ROOT, environment, python

from dschat.chat.load import ChatConfig

ENVIRONMENT = environment(TERM="dumb", OMP_NUM_THREADS="1")


def run_chat(
    *flags: str, stdin: str = "", unwanted: tuple[str, ...]
) -> subprocess.CompletedProcess:
    """chat.py in a process of its own, which ends with 77 where it imported the ``unwanted``."""
    source = (
        "import atexit, os, runpy, sys\n"
        f"atexit.register(lambda: {set(unwanted)!r} & sys.modules.keys() and os._exit(77))\n"
        f"runpy.run_path({str(ROOT / 'chat.py')!r}, run_name='__main__')"
    )
    return python("-c", source, *flags, input=stdin, env=ENVIRONMENT)


PROMPTS = ["Say hello.", "", "What is 2 plus 2? ☃", "Say hello."]


@pytest.mark.slow
def test_pipes(checkpoint, tokenizer):
    """Nothing but answers on stdout, and no deepspeed."""
    flags = ["--path", str(checkpoint), "--greedy", "--max-new-tokens", "8"]
    done = run_chat(*flags, stdin="\n".join(PROMPTS), unwanted=("deepspeed",))
    assert done.returncode == 0, done.stderr
    check_answers(done.stdout, checkpoint, tokenizer)


def test_piped_lines(checkpoint, tokenizer, script, typed, capsys):
    from dschat.chat import load_chat

    typed(PROMPTS)
    chat = load_chat(ChatConfig(path=str(checkpoint), greedy=True, max_new_tokens=8))
    script["answer_lines"](chat)
    check_answers(capsys.readouterr().out, checkpoint, tokenizer)


def check_answers(printed, checkpoint, tokenizer):
    """One answer a line, as the model gives it."""
    from transformers import AutoModelForCausalLM

    answers = printed.split("\n")
    assert answers.pop() == ""
    assert len(answers) == 4
    assert answers[1] == ""
    assert answers[0] == answers[3] != ""  # no line remembers another

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        if prompt:
            text = f"<|user|>{prompt}<|assistant|>"
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            expected = tokenizer.decode(out, skip_special_tokens=True).strip()
            expected = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", expected)
            assert answer == expected.replace("\n", "\\n")


@pytest.mark.slow
def test_mistakes_and_help_cost_no_torch():
    """One line and exit code 2, before torch loads; and --help, with 0."""
    done = run_chat("--path", "out/of/nowhere", unwanted=("torch", "transformers", "deepspeed"))
    assert done.stderr == "error: --path out/of/nowhere: no such folder; check the path\n"
    assert (done.returncode, done.stdout) == (2, "")
    done = run_chat("--help", unwanted=("torch", "transformers", "deepspeed"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max_new_tokens" in done.stdout


class Terminal:
    """chat.py on a pseudo-terminal: type, and read what appears."""

    def __init__(self, *flags: str) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "chat.py"), *flags],
            stdin=child,
            stdout=child,
            stderr=child,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str, timeout_s: float = 60.0) -> str:
        """What appears up to and with ``pattern``; the rest waits for the next call."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except OSError:  # the other end is closed
                    data = b""
                assert data, f"the chat ended before {pattern!r}: {self.seen!r}"
                self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def ask(self, line: str, pattern: str) -> str:
        """Type a line; what appears behind its echo."""
        self.type(line + "\n")
        self.read_until(re.escape(line) + r"\n")
        return self.read_until(pattern)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            os.close(self._fd)


@pytest.fixture
def endless(tmp_path, checkpoint) -> Path:
    """A model that never ends an answer by itself, with room for very long ones."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():  # every position says the same: a word, whatever was said before
        for parameter in model.model.layers.parameters():
            parameter.zero_()
    model.config.max_position_embeddings = 100_000
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_terminal(endless):
    """Commands; and Ctrl-C, which stops an answer while there is one and leaves at the prompt."""
    terminal = Terminal("--path", str(endless), "--max_new_tokens", "50000", "--seed", "5")
    terminal.read_until(r"\n> ")
    assert "/system TEXT" in terminal.ask("/help", r"\n> ")
    assert "did" not in terminal.ask("/system Be kind.", r"\(system message set\)\n> ")
    assert "(no command /nonsense" in terminal.ask("/nonsense", r"\n> ")

    terminal.type("tell me everything\n")
    terminal.read_until(r"tell me everything\n")
    # The answer would take minutes. Wait for 20 words: on a busy machine a signal during the first
    # token was once lost, for an unknown reason.
    terminal.read_until(r"(\S+\s+){20}")
    terminal.interrupt()
    assert terminal.read_until(r"\(stopped\)\n> ", timeout_s=60)
    assert terminal.process.poll() is None

    terminal.ask("/reset", r"\(a new conversation\)\n> ")
    # Python's input() misses a signal that comes just before it waits for keys: as a user would,
    # press again.
    for _ in range(4):
        terminal.interrupt()
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(timeout=5)
            break
    assert terminal.close() == 0
