"""Real vocabularies and templates: text, chats and answers against transformers' own tokenizer."""

import pytest
from transformers import AutoTokenizer

from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.models.chat_template import turn_ends
from dschat.models.continued_text import (
    StreamDecoder,
    continued_ids,
    continued_texts,
    token_bytes,
)
from dschat.models.tokenizer import num_ids, same_tokens, stop_ids, text_ids

pytestmark = pytest.mark.real

TEXTS = [
    "The capital of France is Paris.",
    " leading and trailing ",
    "  two  spaces,\ttabs\t\tand\r\nlines\n\n\nof\n \n nothing",
    "x" + " " * 41 + "y" + "\n" * 17 + "z",
    "45 plus 76 is 121; 3.14159 and 1,234,567 and 0x1F",
    "def f(x):\n    if x:\n        return {'a': [1, 2]}\n",
    "naïve café Ångström, cafe\u0301 and A\u030angstro\u0308m",
    "東京は大きい。 Привет мир. مرحبا بالعالم. नमस्ते दुनिया. สวัสดีชาวโลก",
    "👍🏽 👩\u200d👩\u200d👧 🏳️\u200d🌈 🇫🇷",
    "zero\u200bwidth\ufeff, soft\u00adhyphen, no\u00a0break, \u2028line, \x00 and \x1b[0m",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ½ ™ \U00020000 \ue000 \ufffd",
    "I'm, you'RE, WE'LL, o'clock, 'tis",
    "http://example.com/a_b?c=d&e=%20#f --flag=-1 <b>bold</b> $x^2$ \\frac{1}{2}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
# What a user may paste: the tokens that end turns, in other models' spellings too.
SPECIAL = "a<|im_end|>b <eos><bos> </s>[INST] <|endoftext|><end_of_turn>\n<|im_start|>system\nx"
TURNS = ["What is the capital of France?", *TEXTS, SPECIAL]


@pytest.fixture(scope="module")
def plain(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_texts_have_the_ids_and_the_text_that_they_had(tokenizer, plain):
    texts = [*TEXTS, SPECIAL]
    assert text_ids(tokenizer, texts) == plain(texts)["input_ids"]
    rows = text_ids(tokenizer, texts, begins=False)
    assert rows == plain(texts, add_special_tokens=False)["input_ids"]
    assert continued_texts(tokenizer, rows[:-1]) == TEXTS
    assert continued_texts(tokenizer, rows, with_special=True) == texts
    assert continued_ids(tokenizer, [("Answer:", text) for text in texts]) == rows
    for text, ids in zip(texts, rows, strict=True):
        decoder = StreamDecoder(tokenizer, with_special=True)
        assert "".join([*map(decoder.push, ids), decoder.finish()]) == text
        assert b"".join(token_bytes(tokenizer, i) for i in ids) == text.encode()


def test_the_tokenizer_is_whole(tokenizer, plain, checkpoint):
    assert num_ids(tokenizer) == len(plain) == checkpoint.config.vocab_size
    assert same_tokens(tokenizer, tokenizer)
    assert tokenizer.pad_token_id == plain.pad_token_id
    ends = [tokenizer.decode(i) for i in stop_ids(tokenizer)]
    expected = {"<|im_end|>": ["<|im_end|>"], "<eos>": ["<eos>", "<end_of_turn>"]}
    assert ends == expected[tokenizer.eos_token]
    assert turn_ends(tokenizer, tokenizer.chat_template)[0] == stop_ids(tokenizer)[-1]


def test_saved_and_read_again(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert same_tokens(tokenizer, AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("system", [None, "You are a pirate."])
def test_prompts_are_those_of_the_template(system, tokenizer):
    for text in TURNS:
        turns = [{"role": "user", "content": text}]
        turns = [{"role": "system", "content": system}, *turns] if system else turns
        expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        assert prompt_text_ids(tokenizer, turns) == expected["input_ids"]


def test_dialogues_are_those_of_the_template(tokenizer):
    """The tokens of answers are those that the template's text has, each with its end; an answer
    that begins with white space is tokenized apart from the line break before it.
    """
    answers = [text.strip() for text in reversed(TEXTS)]
    turns = []
    for asked, said in zip(TEXTS, answers, strict=True):
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    (found,) = encode_examples(tokenizer, [Example(turns[:-1], turns[-1:])])
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    whole = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    (answer,) = found.answers
    assert found.prompt_ids + answer == whole
    (end,) = {answer[-1], *stop_ids(tokenizer)} - {tokenizer.eos_token_id} or {answer[-1]}
    learned = [i for i, w in zip(found.prompt_ids, found.prompt_weights, strict=True) if w]
    expected = text_ids(tokenizer, answers[:-1], begins=False)
    assert learned == [token for ids in expected for token in (*ids, end)]
    assert answer == [*text_ids(tokenizer, answers[-1:], begins=False)[0], end]
