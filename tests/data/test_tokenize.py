"""From examples to ids: prompts, answers, loss masks and cuts."""

import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import only, step_table
from dialogues import REPLY, SYSTEM, USER
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import some
from tool_templates import HERMES, SCHEMAS, tokenizer_of

from dschat.config import RLHFConfig, UserError
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.data.tokenize import prompt_dataset

# drops the thoughts of earlier turns, as reasoning models' templates do
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'].split(';')[-1] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = byte_tokenizer("</s>", pad_token="</s>")  # pad == eos, no BOS, no template
OPT_LIKE = byte_tokenizer("</s>", frame="</s> $A", bos_token="</s>", pad_token="<pad>")
LLAMA_LIKE = byte_tokenizer("</s>", frame="<s> $A </s>", bos_token="<s>", pad_token="</s>")
CHAT = byte_tokenizer("<|im_end|>", CHATML, pad_token="<|im_end|>")
TOKENIZERS = {"plain": PLAIN, "opt": OPT_LIKE, "llama": LLAMA_LIKE, "chat": CHAT}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@pytest.fixture
def table(write):
    """``table(rows, tokenizer, purpose)``: one step's table of all these rows."""
    return lambda rows, *args, **knobs: step_table(write(rows), *args, **knobs)


# -- prompts and answers

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@every_tokenizer
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(text, min_size=1, max_size=4), answer=text, opening=text)
def test_training_and_generation_see_the_same_prompt_ids(tokenizer, turns, answer, opening):
    dialogue = [USER(t) if i % 2 == 0 else REPLY(t) for i, t in enumerate(turns)]
    dialogue = dialogue if dialogue[-1]["role"] == "user" else dialogue[:-1]
    dialogue = [{"role": "system", "content": opening}, *dialogue]
    examples = [Example(opening, answer), Example(dialogue, [REPLY(answer)])]
    for example, encoded in zip(examples, encode_examples(tokenizer, examples), strict=True):
        assert not encoded.problem
        assert encoded.prompt_ids == prompt_text_ids(tokenizer, example.prompt)
        (ids,) = encoded.answers
        assert ids.count(tokenizer.eos_token_id) == 1
        assert ids[-1] == tokenizer.eos_token_id
        written = tokenizer.decode(ids[:-1])
        assert written in (answer, " " + answer)


@every_tokenizer
def test_text_is_trained_on_the_answer_and_its_eos_alone(tokenizer, table):
    rows = [{"prompt": "2+2? ", "chosen": "x"}, {"prompt": "é", "chosen": "日本"}]
    made = table(rows, tokenizer)
    for row, answer in zip(made, ("x", "日本"), strict=True):
        assert trained(tokenizer, row) == [answer + tokenizer.eos_token]
    first = made[0]
    assert sum(first["loss_mask"]) == 2  # one token and EOS
    bos = [] if tokenizer in (PLAIN, CHAT) else [tokenizer.bos_token_id]
    bare = tokenizer("2+2? ", add_special_tokens=False)["input_ids"]
    end = [*tokenizer("x", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert first["input_ids"] == bos + bare + end


def test_an_answer_that_begins_with_eos_has_no_tokens(table, log):
    rows = [{"prompt": "p", "chosen": "</s>no"}, {"prompt": "q", "chosen": "yes"}]
    assert len(table(rows, PLAIN)) == 1
    assert "1 dropped (an answer without tokens)" in log.text


def test_a_prompt_that_ends_with_eos_keeps_it():
    """Of the EOS that a tokenizer appends to a prompt, there is none."""
    appends = byte_tokenizer("</s>", frame="$A </s>")
    for tokenizer in (PLAIN, appends):
        assert tokenizer.decode(prompt_text_ids(tokenizer, "ab")) == "ab"
    assert PLAIN.decode(prompt_text_ids(PLAIN, "ab</s>")) == "ab</s>"


def test_default_template_of_a_tokenizer_that_has_none():
    dialogue = [USER("hi"), REPLY("yes"), USER("so?")]
    ids = prompt_text_ids(OPT_LIKE, dialogue)
    assert OPT_LIKE.decode(ids) == (
        "</s>\n\nHuman: hi\n\nAssistant: yes</s>\n\nHuman: so?\n\nAssistant:"
    )
    assert PLAIN.decode(prompt_text_ids(PLAIN, dialogue[:1])) == "\n\nHuman: hi\n\nAssistant:"
    ((answer,),) = [e.answers for e in encode_examples(PLAIN, [Example(dialogue, [REPLY("no")])])]
    assert PLAIN.decode(answer) == " no</s>"


def test_a_template_is_rendered_once_with_its_special_tokens():
    ids = prompt_text_ids(CHAT, [USER("hi")])
    assert CHAT.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(CHAT.convert_tokens_to_ids("<|im_start|>")) == 2


def test_dialogues_are_trained_on_assistant_turns_only(table):
    asked = [SYSTEM("be kind"), USER("hi"), REPLY("hello"), USER("and?"), REPLY("the answer")]
    rows = [{"messages": asked}]
    (row,) = table(rows, CHAT)
    assert trained(CHAT, row) == ["hello<|im_end|>", "the answer<|im_end|>"]
    (without_template,) = table(rows, LLAMA_LIKE)
    assert trained(LLAMA_LIKE, without_template) == [" hello</s>", " the answer</s>"]
    # the text between the turns is exactly the template's
    rendered = CHAT.apply_chat_template(asked, tokenize=False)
    assert CHAT.decode(row["input_ids"]) + "\n" == rendered


def test_a_dialogue_that_ends_with_the_user_is_trained_up_to_its_last_answer(table):
    rows = [{"messages": [USER("hi"), REPLY("hello"), USER("bye")]}]
    (row,) = table(rows, CHAT)
    assert trained(CHAT, row) == ["hello<|im_end|>"]
    assert "bye" not in CHAT.decode(row["input_ids"])
    (row,) = table(rows, CHAT, "rlhf")
    assert row["prompt_text"] == "bye"
    assert row["prompt_ids"] == prompt_text_ids(CHAT, rows[0]["messages"])


def test_prompts_show_tools(write):
    """Those of the run, or of their rows; with them, a text is a user's turn."""
    tokenizer, row = tokenizer_of(HERMES), {"messages": [USER("hi")], "tools": SCHEMAS}
    own = [{"type": "function", "function": {"name": "mine"}}]
    for rows, tools in (([{"prompt": "hi"}], own), ([row], own), ([row], None)):
        config = RLHFConfig(data_path=[write(rows)], **only("rlhf"), max_prompt_seq_len=2000)
        (made,) = prompt_dataset(config, tokenizer, tools=tools)
        assert made["prompt_ids"] == prompt_text_ids(
            tokenizer, [USER("hi")], tools=tools or SCHEMAS
        )


def test_train_on_prompt_trains_all_but_the_first_token(table):
    rows = [{"prompt": "question", "chosen": "a"}, {"messages": [USER("u"), REPLY("r")]}]
    for row in rows:
        (made,) = table([row], CHAT, train_on_prompt=True)
        assert made["loss_mask"] == [False] + [True] * (len(made["input_ids"]) - 1)


def test_each_answer_of_a_rewritten_dialogue_is_trained_as_the_model_sees_it(table, log):
    tokenizer = byte_tokenizer("</s>", FORGETFUL)
    dialogue = [USER("hi"), REPLY("hmm;hello"), USER("and?"), REPLY("aha;bye")]
    seen = {
        "hmm;hello</s>": "<user>hi</s><assistant>hmm;hello</s>",
        "aha;bye</s>": "<user>hi</s><assistant>hello</s><user>and?</s><assistant>aha;bye</s>",
    }
    rows = [{"messages": dialogue}]
    made = table(rows, tokenizer)
    assert "2 rows" in log.text
    assert "1 are earlier answers" in log.text
    assert [(trained(tokenizer, row), tokenizer.decode(row["input_ids"])) for row in made] == [
        ([answer], text) for answer, text in seen.items()
    ]
    of_the_last = table(rows, tokenizer, train_on="last")
    dialogue[1]["weight"] = 0
    for (row,) in (of_the_last, table(rows, tokenizer)):
        assert trained(tokenizer, row) == ["aha;bye</s>"]


def test_a_tokenizer_without_eos_is_refused(table):
    tokenizer = byte_tokenizer(None)
    with pytest.raises(UserError, match="no EOS token"):
        table([{"prompt": "p", "chosen": "c"}], tokenizer)


# -- lengths


def test_long_rows_lose_the_start_of_the_prompt_then_the_end_of_the_answer(table, log):
    rows = [
        {"prompt": "0123456789", "chosen": "abc"},  # one token a character
        {"prompt": "0123456789", "chosen": "abcdefghijk"},
        {"prompt": "01", "chosen": "abc"},
    ]
    plain = [PLAIN.decode(row["input_ids"]) for row in table(rows, PLAIN, max_seq_len=8)]
    assert plain == ["6789abc</s>", "89abcdef", "01abc</s>"]  # a quarter is the prompt's
    assert "2 lost the beginning of the prompt; 1 lost the end of the answer" in log.text
    made = table(rows, LLAMA_LIKE, max_seq_len=8)
    assert [LLAMA_LIKE.decode(row["input_ids"]) for row in made][0] == "<s>789abc</s>"
    assert LLAMA_LIKE.decode(made[1]["input_ids"]) == "<s>9abcdef"
    assert trained(LLAMA_LIKE, made[1]) == ["abcdef"]
    shortest = table(rows, LLAMA_LIKE, max_seq_len=4)
    assert LLAMA_LIKE.decode(shortest[1]["input_ids"]) == "9abc"  # of one token BOS tells nothing
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) <= 8 for row in made)


@pytest.mark.parametrize("max_len", some(range(2, 24), [2, 3, 4, 7, 13, 23]))
def test_every_length_limit_holds_and_leaves_a_target(max_len, table):
    rows = [
        {"messages": [USER("hi"), REPLY("hello"), USER("and?"), REPLY("bye")]},
        {"messages": [USER("hi, a longer beginning"), REPLY("y")]},
    ]
    for row in table(rows, LLAMA_LIKE, max_seq_len=max_len):
        assert len(row["input_ids"]) <= max_len
        assert any(row["loss_mask"])
        assert not row["loss_mask"][0]


def test_the_two_sides_of_a_pair_share_their_prompt(table, log):
    rows = [
        {"prompt": "0123456789", "chosen": "a", "rejected": "abcd"},
        {"prompt": "0123456789", "chosen": "abcde", "rejected": "x"},  # its quarter and no more
        {"prompt": "0", "chosen": "abcdef", "rejected": "x"},  # whole: shorter than a quarter
        {"prompt": "01", "chosen": "same</s>", "rejected": "same"},
    ]
    made = table(rows, PLAIN, "reward", max_seq_len=8)
    sides = [(PLAIN.decode(r["chosen_ids"]), PLAIN.decode(r["rejected_ids"])) for r in made]
    assert sides == [
        ("789a</s>", "789abcd</s>"),
        ("89abcde</s>", "89x</s>"),
        ("0abcdef</s>", "0x</s>"),
    ]
    assert made["prompt_length"][:] == [3, 2, 1]
    assert "1 dropped (chosen and rejected alike)" in log.text
    assert "2 lost the beginning of the prompt" in log.text


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_with_an_answer_that_does_not_fit_is_dropped(side, table, log):
    """Otherwise both would lose their prompt, and one its EOS."""
    rows = [
        {"prompt": "why?", "chosen": "yes", "rejected": "no"},
        {"prompt": "how?", "chosen": "yes", "rejected": "no"} | {side: "x" * 14},
    ]
    (row,) = table(rows, PLAIN, "reward", max_seq_len=16)
    assert PLAIN.decode(row["chosen_ids"]) == "why?yes</s>"
    assert "1 dropped (an answer too long for --max_seq_len 16)" in log.text


def test_prompts_that_are_too_long_are_dropped_and_keep_their_numbers(table, log):
    rows = [{"prompt": "012345678"}, {"prompt": "01234567"}, {"prompt": "é日"}]
    made = table(rows, PLAIN, "rlhf", max_prompt_seq_len=8)
    assert [(row["index"], row["prompt_text"]) for row in made] == [(1, "01234567"), (2, "é日")]
    assert [row["prompt_ids"] for row in made] == [
        PLAIN(row["prompt"])["input_ids"] for row in rows[1:]
    ]
    assert "1 dropped (longer than --max_prompt_seq_len 8)" in log.text
    with pytest.raises(UserError, match="--max_prompt_seq_len 4"):
        table(rows[:1], PLAIN, "rlhf", max_prompt_seq_len=4)


def test_splits_come_one_by_one_or_together(table):
    rows = [{"prompt": f"p{i}", "chosen": "c"} for i in range(20)]
    made = {
        split: table(rows, PLAIN, split=split, eval_fraction=0.25)
        for split in ("both", "train", "eval")
    }
    assert [len(part) for part in made["both"]] == [15, 5]
    assert [made[split][:] for split in ("train", "eval")] == [part[:] for part in made["both"]]
    none = table(rows, PLAIN, split="eval")
    assert (len(none), none.column_names) == (0, made["train"].column_names)
