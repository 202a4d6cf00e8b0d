"""A dialogue's segments, joined, are the ids of the rendered text; decoded answers keep their
spaces.
"""

import random

import pytest
from joined_texts import KINDS, TEMPLATES, awkward_text, dialogue, tokenizer_of
from quick import each_once

from dschat.data.rendering import render_chat
from dschat.data.segments import (
    Segment,
    answer_segment,
    encode,
    prompt_segments,
    prompt_text_ids,
)
from dschat.environments.contract import Observation
from dschat.environments.template_text import ObservationTokens
from dschat.models.chat_template import default_template
from dschat.models.continued_text import StreamDecoder, continued_texts


def made(kind, template):
    tokenizer = tokenizer_of(kind, TEMPLATES[template])
    tokenizer.chat_template = tokenizer.chat_template or default_template(tokenizer)
    return tokenizer


def differs(tokenizer, texts, ids):
    """Whether ``ids`` differ from those of the joined texts, where they may not.

    They may where a token of the whole text reaches over a border between two texts (line breaks
    and spaces on both sides), and in the order of pieces that Unigram finds equally likely.
    """
    text = "".join(texts)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    borders = {sum(map(len, texts[: i + 1])) for i in range(len(texts))}
    if any(a < border < b for a, b in whole["offset_mapping"] for border in borders):
        return None
    return ids != whole["input_ids"] and sorted(ids) != sorted(whole["input_ids"])


@pytest.mark.parametrize(("kind", "template"), each_once(KINDS, TEMPLATES))
def test_joined_segments_are_the_rendered_text(kind, template):
    tokenizer, draw, compared = made(kind, template), random.Random(7), 0
    for _ in range(40):
        chat = dialogue(draw, draw.choice([2, 4, 6]))
        pieces = [*prompt_segments(tokenizer, chat[:-1])]
        pieces.append(answer_segment(tokenizer, chat[:-1], chat[-1:]))
        texts = [piece.text for piece in pieces]
        assert "".join(texts) == render_chat(tokenizer, chat)
        found = differs(tokenizer, texts, [i for ids in encode(tokenizer, pieces) for i in ids])
        assert not found, texts
        compared += found is not None
    tiny = template == "default" and kind in {
        "prepend",
        "replace",
    }  # learned ":▁", which no model has
    assert tiny or compared > 10


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "wordpiece"])
def test_an_answer_has_no_space_of_its_own(kind):
    """Text rows: prompt + answer; what the answer says is what decoding the whole gives."""
    tokenizer, draw = tokenizer_of(kind), random.Random(3)
    for _ in range(60):
        prompt, answer = "Question: x=(", awkward_text(draw).replace("\ufffd", "")
        asked, ids = encode(tokenizer, [Segment(prompt), Segment(answer, before=prompt)])
        before = tokenizer.decode(asked)
        whole = tokenizer.decode(asked + ids, skip_special_tokens=True)
        assert (
            continued_texts(tokenizer, [ids, [*ids, tokenizer.eos_token_id]])
            == [whole[len(before) :]] * 2
        )
        stream = StreamDecoder(tokenizer)
        assert "".join([*map(stream.push, ids), stream.finish()]) == whole[len(before) :]
        known = not {"\U0001f600", "\u6771", "ï", "\t", "\n"} & {*answer}
        assert whole[len(before) :] == answer or not known


def test_code_keeps_four_spaces():
    tokenizer = tokenizer_of("prepend")
    _, ids = encode(tokenizer, [Segment("x\n"), Segment("    return a", before="x\n")])
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "▁▁▁▁return▁a"
    assert continued_texts(tokenizer, [ids]) == ["    return a"]


@pytest.mark.parametrize("kind", ["prepend", "metaspace-always", "metaspace-first"])
def test_added_tokens_that_absorb_spaces(kind):
    """Phi-3's <|end|> and roles do; and after them a text starts anew."""
    from tokenizers import AddedToken

    tokenizer = made(kind, "chatml")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|model|>", rstrip=True, normalized=False)]}
    )
    texts = ["<|im_start|>hello<|model|>\n", "Paris", "<|im_end|>"]
    segments = [Segment(t, before="".join(texts[:i])) for i, t in enumerate(texts)]
    joined = [i for ids in encode(tokenizer, segments) for i in ids]
    assert joined == tokenizer("".join(texts), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["prepend", "metaspace-first", "byte-level-prefix", "byte-level"])
def test_an_observation_continues_the_episode(kind, template):
    tokenizer = made(kind, template)
    chat = [{"role": "user", "content": "the sun"}, {"role": "assistant", "content": "is a star"}]
    said = {"role": "user", "content": "add(a, b)"}
    asked = prompt_text_ids(tokenizer, chat[:1])
    (answer,) = encode(tokenizer, [answer_segment(tokenizer, chat[:1], chat[1:])])
    end = max(n for n, i in enumerate(answer) if i in tokenizer.added_tokens_decoder)
    ids = asked + answer[: end + 1] + ObservationTokens(tokenizer, True)(Observation("add(a, b)"))
    assert ids == prompt_text_ids(tokenizer, [*chat, said])
