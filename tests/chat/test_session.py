"""Talking to a model: what the prompt is, what shows when, what is forgotten, what is refused."""

import io
import os
import pty
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dschat.builtin.tiny_model import materialise_tiny, tiny_tokenizer
from dschat.chat.load import ChatConfig
from dschat.chat.session import Chat, Conversation
from dschat.chat.stream_decoder import StreamDecoder
from dschat.config import UserError, parser
from dschat.inference.protocol import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    materialise_tiny(folder)
    return folder


class Scripted:
    """A generator that answers with given tokens, and remembers what it was asked."""

    def __init__(self, answers: list[list[int]], max_positions: int | None = None) -> None:
        self.max_positions = max_positions
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self._answers = iter(answers)

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Iterator[int]:
        self.asked.append((prompt, sampling))
        yield from next(self._answers)


def scripted_chat(tokenizer, *answers: str, positions=None, system=None, **sampling):
    """A chat whose answers are these texts, each ended by EOS; and its generator."""
    eos = tokenizer.eos_token_id
    tokens = [[*tokenizer(a, add_special_tokens=False)["input_ids"], eos] for a in answers]
    generator = Scripted(tokens, positions)
    params = SamplingParams(**({"max_new_tokens": 20} | sampling))
    return Chat(generator, tokenizer, (eos,), params, system), generator


# -- streaming ------------------------------------------------------------------------------------


def streamed(tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@pytest.mark.parametrize(
    "text",
    ["naïve café", "日本語です", "👩‍👩‍👧 family", "  two  spaces\n\nlines ", "a\u0301e", "\u00a0x"],
)
def test_stream_decoder_never_shows_half_a_character(tokenizer, text):
    """Byte-level tokens: characters of two to four bytes come whole, and none is lost."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([p for p in pieces if p]) > 1  # it did stream


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stream_decoder_equals_decoding_at_once(tokenizer, data):
    """Any tokens at all: broken bytes, special tokens between others, characters never finished."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(streamed(tokenizer, ids)) == whole


def test_stream_decoder_says_what_was_cut_within_a_character(tokenizer):
    ids = tokenizer("x日", add_special_tokens=False)["input_ids"][:-1]
    assert streamed(tokenizer, ids)[-1] == "\ufffd"


def test_stream_decoder_keeps_sentencepiece_spaces():
    """Tokens whose leading space vanishes where they stand first, byte tokens, special tokens."""
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "▁Hello", "▁wide", "▁world", "!", *(f"<0x{b:02X}>" for b in range(256))]
    raw = Tokenizer(models.Unigram([(w, -1.0) for w in words], unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    euro = [5 + b for b in "€".encode()]
    pieces = streamed(tokenizer, [1, 0, 2, *euro, 3, 4])
    assert pieces == ["Hello", "", " wide", "", "", "€", " world", "!", ""]


# -- history --------------------------------------------------------------------------------------


def test_prompt_is_the_tokens_that_training_sees(tokenizer):
    """The second prompt is, token by token, a training example of the dialogue so far."""
    from dschat.data.segments import encode_examples
    from dschat.data.sources.adapters import Example

    chat, generator = scripted_chat(tokenizer, " Paris.", "Rome.", system="Be kind.")
    assert "".join(chat.reply("capital of France?")) == "Paris."  # its opening space is not text
    assert "".join(chat.reply("and of Italy?")) == "Rome."
    dialogue = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "and of Italy?"},
    ]
    (trained,) = encode_examples(tokenizer, [Example(dialogue)], ())
    assert generator.asked[1][0] == trained.prompt_ids
    assert tokenizer.decode(trained.prompt_ids) == (
        "<|system|>Be kind.<|user|>capital of France?<|assistant|>Paris.<|end|>"
        "<|user|>and of Italy?<|assistant|>"
    )


def test_reset_forgets_and_keeps_the_system_message(tokenizer):
    chat, generator = scripted_chat(tokenizer, "One.", "Two.", "Three.")
    chat.set_system("Be brief.")
    "".join(chat.reply("first"))
    chat.reset()
    "".join(chat.reply("second"))
    chat.set_system(None)
    "".join(chat.reply("third"))
    prompts = [tokenizer.decode(ids) for ids, _ in generator.asked]
    assert prompts[1] == "<|system|>Be brief.<|user|>second<|assistant|>"
    assert prompts[2] == "<|user|>second<|assistant|>Two.<|end|><|user|>third<|assistant|>"


def test_oldest_exchanges_are_forgotten_when_positions_run_out(tokenizer, caplog):
    """Every prompt leaves room for its answer; a line says what went, and the rest stays."""
    chat, generator = scripted_chat(tokenizer, *["Good day."] * 12, positions=64, system="Be kind.")
    with caplog.at_level("WARNING", logger="dschat"):
        for n in range(12):
            "".join(chat.reply(f"question {n}"))
    for ids, sampling in generator.asked:
        assert len(ids) + sampling.max_new_tokens <= 64
        assert sampling.max_new_tokens == 20
        assert tokenizer.decode(ids).startswith("<|system|>Be kind.<|user|>question ")
    assert "question 11" in tokenizer.decode(generator.asked[-1][0])
    assert "question 10" in tokenizer.decode(generator.asked[-1][0])
    assert "question 0<" not in tokenizer.decode(generator.asked[-1][0])
    forgotten = sum(int(re.search(r"(\d+) oldest exchanges", m)[1]) for m in caplog.messages)
    assert forgotten == 12 - len(chat.conversation.exchanges) > 0


def test_long_answers_get_less_than_they_ask_for_before_history_goes(tokenizer):
    """max_new_tokens beyond the positions: half of them stay history's."""
    chat, generator = scripted_chat(
        tokenizer, "Yes.", "No.", positions=64, max_new_tokens=1_000_000
    )
    "".join(chat.reply("one"))
    "".join(chat.reply("two"))
    assert len(chat.conversation.exchanges) == 2
    for ids, sampling in generator.asked:
        assert len(ids) + sampling.max_new_tokens == 64


def test_a_prompt_beyond_the_positions_is_refused_and_costs_no_history(tokenizer):
    chat, _ = scripted_chat(tokenizer, "Yes.", positions=64)
    "".join(chat.reply("one"))
    with pytest.raises(UserError, match="the model has 64 positions"):
        "".join(chat.reply("word " * 100))
    assert chat.conversation.exchanges == [("one", "Yes.")]


def test_a_stopped_answer_is_remembered_as_far_as_it_came(tokenizer):
    chat, _ = scripted_chat(tokenizer, "Paris is the capital.", "Rome.")
    pieces = chat.reply("capital of France?")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert chat.conversation.exchanges == [("capital of France?", said.strip())]
    assert "Paris is the capital.".startswith(said)


def test_control_characters_never_reach_the_terminal(tokenizer):
    chat, _ = scripted_chat(tokenizer, "a\x1b[2Jb\r\nc\td")
    assert "".join(chat.reply("x")) == "a\ufffd[2Jb\nc\td"


def test_every_answer_has_draws_of_its_own(tokenizer):
    chat, generator = scripted_chat(tokenizer, "A.", "B.", seed=7)
    again, same = scripted_chat(tokenizer, "A.", "B.", seed=7)
    for c in (chat, again):
        for text in ("x", "x"):
            "".join(c.reply(text))
    first, second = (sampling.seed for _, sampling in generator.asked)
    assert first != second
    assert [s.seed for _, s in same.asked] == [first, second]


def test_a_template_that_refuses_a_message_is_a_user_error(tokenizer):
    strict = tiny_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + strict.chat_template
    )
    chat, _ = scripted_chat(strict, "Yes.")
    with pytest.raises(UserError, match="no system role"):
        chat.set_system("Be kind.")
    assert "".join(chat.reply("x")) == "Yes."  # the former one stays


def test_a_tokenizer_without_a_template_gets_the_one_of_training():
    bare = tiny_tokenizer()
    bare.chat_template = None
    talk = Conversation("Be kind.")
    talk.exchanges.append(("Hi", "Hello."))
    assert bare.decode(talk.prompt_ids(bare, "Well?")) == (
        "\n\nSystem: Be kind."
        "\n\nHuman: Hi\n\nAssistant: Hello.<|end|>"
        "\n\nHuman: Well?\n\nAssistant:"
    )


# -- the script -----------------------------------------------------------------------------------


def run_chat(
    *flags: str, stdin: str = "", unwanted: tuple[str, ...]
) -> subprocess.CompletedProcess:
    """chat.py in a process of its own, which ends with 77 where it imported the ``unwanted``."""
    source = (
        "import atexit, os, runpy, sys\n"
        f"atexit.register(lambda: {set(unwanted)!r} & sys.modules.keys() and os._exit(77))\n"
        f"runpy.run_path({str(ROOT / 'chat.py')!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", source, *flags],
        input=stdin.encode(),
        capture_output=True,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )


PROMPTS = ["Say hello.", "", "What is 2 plus 2? ☃", "Say hello."]


@pytest.mark.slow
def test_pipes(checkpoint, tokenizer):
    """Nothing but answers on stdout, and no deepspeed."""
    flags = ["--path", str(checkpoint), "--greedy", "--max-new-tokens", "8"]
    done = run_chat(*flags, stdin="\n".join(PROMPTS), unwanted=("deepspeed",))
    assert done.returncode == 0, done.stderr.decode()
    check_answers(done.stdout.decode(), checkpoint, tokenizer)


def test_piped_lines(checkpoint, tokenizer, monkeypatch, capsys):
    from dschat.chat import load_chat

    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(PROMPTS)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # SIGPIPE is to end chat.py, not pytest
    chat = load_chat(ChatConfig(path=str(checkpoint), greedy=True, max_new_tokens=8))
    runpy.run_path(str(ROOT / "chat.py"))["answer_lines"](chat)
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


def test_mistakes_and_help_cost_no_torch():
    """One line and exit code 2, before torch loads; and --help, with 0."""
    done = run_chat("--path", "out/of/nowhere", unwanted=("torch", "deepspeed"))
    assert done.stderr.decode() == "error: --path out/of/nowhere: no such folder; check the path\n"
    assert (done.returncode, done.stdout) == (2, b"")
    done = run_chat("--help", unwanted=("torch", "deepspeed"))
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--max_new_tokens" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--path is missing; name a model's folder"),
        ("--path x --temprature 1", "unknown flag --temprature; did you mean --temperature?"),
        ("--path x --top-p 1.5", "--top_p 1.5 must be in (0, 1]; 1 turns it off"),
        ("--path x --min_p 1", "--min_p 1.0 must be in [0, 1); 0 turns it off"),
        ("--path x --max-new-tokens 0", "--max_new_tokens 0 must be at least 1"),
        ("--path x --dtype fp8", "--dtype 'fp8' is not one of 'auto', 'fp32', 'bf16'"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        parser.parse(ChatConfig, flags.split(), takes_file=False)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "LlamaForSequenceClassification",
            "is a reward model, which scores and does not generate text",
        ),
        ("T5ForConditionalGeneration", "is a T5ForConditionalGeneration; name a causal LM"),
        (None, "no config.json there, so no model; did you mean {}/step3_rlhf/actor?"),
    ],
)
def test_other_models_are_refused_before_weights(tmp_path, checkpoint, architecture, message):
    from dschat.chat.load import load_chat

    folder = tmp_path / ("step3_rlhf/actor" if architecture is None else "")
    folder.mkdir(parents=True, exist_ok=True)
    config = (checkpoint / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("LlamaForCausalLM", architecture or "X"))
    with pytest.raises(UserError) as caught:  # without weights in the folder
        load_chat(ChatConfig(path=str(tmp_path)))
    assert str(caught.value).startswith(f"--path {tmp_path}")
    assert message.format(tmp_path) in str(caught.value)


def test_system_message_is_checked_before_weights(tmp_path, checkpoint):
    from dschat.chat.load import load_chat

    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('only users may speak') }}"
    strict.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(UserError, match="only users may speak"):
        load_chat(ChatConfig(path=str(tmp_path), system="Be kind."))


def test_sampling_flags():
    config = ChatConfig(path="x", temperature=0.5, top_k=3, greedy=True)
    assert config.sampling == SamplingParams(
        max_new_tokens=256, temperature=0.0, top_k=3, seed=1234
    )
    assert replace(config, greedy=False).sampling.temperature == 0.5


class Terminal:
    """chat.py on a pseudo-terminal: type, and read what appears."""

    def __init__(self, *flags: str) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "chat.py"), *flags],
            stdin=child,
            stdout=child,
            stderr=child,
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
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


@pytest.mark.parametrize("last", ["/quit", EOFError()])
def test_conversation_on_a_terminal(tokenizer, monkeypatch, capsys, last):
    """What is printed, in order; blank lines are not prompts."""
    chat, generator = scripted_chat(tokenizer, "Hi there.", "Well.")
    typed = iter(["hello", "   ", "/system", "/system Be kind.", "word " * 600, "again", last])

    def next_line(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return line

    generator.max_positions = 512
    monkeypatch.setattr("builtins.input", next_line)
    runpy.run_path(str(ROOT / "chat.py"))["converse"](chat)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "Hi there."
    assert printed[2:4] == ["(system message removed)", "(system message set)"]
    assert "512 positions" in printed[4]
    assert printed[5] == "Well."
    assert tokenizer.decode(generator.asked[-1][0]) == (
        "<|system|>Be kind.<|user|>hello<|assistant|>Hi there.<|end|><|user|>again<|assistant|>"
    )
