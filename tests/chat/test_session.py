"""A conversation: prompts as in training, what is dropped or refused, what the terminal shows."""

import re
from collections.abc import Iterator

import pytest

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.chat.model import Chat, Conversation
from dschat.config import UserError
from dschat.inference.protocol import SamplingParams


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
    (trained,) = encode_examples(tokenizer, [Example(dialogue)])
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
    assert bare.decode(talk.fit(bare, "Well?", max_len=100)[0]) == (
        "\n\nSystem: Be kind."
        "\n\nHuman: Hi\n\nAssistant: Hello.<|end|>"
        "\n\nHuman: Well?\n\nAssistant:"
    )


@pytest.mark.parametrize("last", [["/quit", "unread"], []], ids=["quit", "end of file"])
def test_conversation_on_a_terminal(tokenizer, script, typed, capsys, last):
    """What is printed, in order; blank lines are not prompts."""
    chat, generator = scripted_chat(tokenizer, "Hi there.", "Well.")
    typed(["hello", "   ", "/system", "/system Be kind.", "word " * 600, "again", *last])
    generator.max_positions = 512
    script["converse"](chat)
    printed = [line.lstrip("> ") for line in capsys.readouterr().out.splitlines()]
    assert printed[1] == "Hi there."
    assert printed[2:4] == ["(system message removed)", "(system message set)"]
    assert "512 positions" in printed[4]
    assert printed[5] == "Well."
    assert tokenizer.decode(generator.asked[-1][0]) == (
        "<|system|>Be kind.<|user|>hello<|assistant|>Hi there.<|end|><|user|>again<|assistant|>"
    )
