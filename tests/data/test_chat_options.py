"""What a user may ask of chats: thoughts, answers with loss, variables of the template, and system
messages that it has no place for.
"""

import json
import logging

import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import only, put
from dialogues import REPLY, SYSTEM, USER
from transformers import AutoTokenizer

from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.data.segments import prompt_text_ids
from dschat.data.tokenize import preference_dataset, prompt_dataset, sft_dataset
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.tokenizer import complete_tokenizer, same_tokens

END = "<|im_end|>"
SHOWS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content }}"
    "{{ m['content'] }}",
)
# as DeepSeek's R1: every answer without its thought
CUTS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
# as Qwen3: thoughts after the last question only
FORGETS = SHOWS.replace("if m.reasoning_content", "if m.reasoning_content and loop.last")
OPENS = CUTS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
THOUGHT = {**REPLY("four"), "reasoning_content": "2+2"}
INLINE = REPLY("<think>\n2+2\n</think>\n\nfour")
WHOLE = f"<think>\n2+2\n</think>\n\nfour{END}"


def trained_texts(folder, messages, template=CHATML, **knobs):
    path, tokenizer = (
        put(folder / "rows.jsonl", [{"messages": messages}]),
        byte_tokenizer(END, template),
    )
    rows = sft_dataset(SFTConfig(data_path=[path], **only("sft"), **knobs), tokenizer)
    return [trained(tokenizer, row) for row in rows]


@pytest.mark.parametrize(
    ("template", "reasoning", "expected"),
    [
        (SHOWS, "auto", WHOLE),
        (SHOWS, "inline", WHOLE),
        (SHOWS, "drop", f"four{END}"),
        (CHATML, "inline", WHOLE),
        (CHATML, "drop", f"four{END}"),
        (CUTS, "auto", WHOLE),
        (OPENS, "auto", WHOLE.removeprefix("<think>\n")),
    ],
)
@pytest.mark.parametrize("turn", [THOUGHT, INLINE], ids=["field", "inline"])
def test_a_thought_is_trained_in_front_of_its_answer(tmp_path, template, reasoning, expected, turn):
    asked = [USER("2+2?"), turn]
    (texts,) = trained_texts(tmp_path, asked, template, reasoning=reasoning)
    assert texts == [expected]
    (texts,) = trained_texts(
        tmp_path, asked, template, reasoning=reasoning, train_on_reasoning=False
    )
    assert texts == [f"four{END}"]


@pytest.mark.parametrize(("template", "reasoning"), [(CHATML, "auto"), (CUTS, "keep")])
def test_a_thought_without_a_place_names_the_flag(tmp_path, template, reasoning):
    with pytest.raises(UserError, match="thoughts .* does not render; see --reasoning"):
        trained_texts(tmp_path, [USER("2+2?"), THOUGHT], template, reasoning=reasoning)


@pytest.mark.parametrize("template", [FORGETS, CUTS])
def test_every_thought_of_a_dialogue_is_trained_where_the_template_forgets_them(tmp_path, template):
    dialogue = [USER("2+2?"), THOUGHT, USER("sure?"), {**REPLY("yes"), "reasoning_content": "hm"}]
    yes = f"<think>\nhm\n</think>\n\nyes{END}"
    assert trained_texts(tmp_path, dialogue, template) == [[WHOLE], [yes]]
    assert trained_texts(tmp_path, dialogue, template, train_on="last") == [[yes]]
    assert trained_texts(tmp_path, dialogue, SHOWS) == [[WHOLE, yes]]
    texts = trained_texts(tmp_path, dialogue, SHOWS, train_on_reasoning=False)
    assert texts == [[f"four{END}", f"yes{END}"]]


@pytest.mark.parametrize("template", [FORGETS, CUTS])
def test_each_answer_of_a_long_dialogue_is_one_row(tmp_path, template):
    turns = [(USER(f"q{i}"), {**REPLY(f"a{i}"), "reasoning_content": f"t{i}"}) for i in range(5)]
    dialogue = [turn for pair in turns for turn in pair]
    rows = trained_texts(tmp_path, dialogue, template)
    assert rows == [[f"<think>\nt{i}\n</think>\n\na{i}{END}"] for i in range(5)]


def test_answers_of_weight_0_have_no_loss_with_the_prompts(tmp_path):
    dialogue = [USER("a"), {**REPLY("b"), "weight": 0}, USER("c"), REPLY("d")]
    for train_on in ("all", "last"):
        (texts,) = trained_texts(tmp_path, dialogue, train_on=train_on, train_on_prompt=True)
        assert not any("b" in text for text in texts)


def test_answers_with_loss_by_flag_and_by_list(tmp_path):
    dialogue = [USER("a"), REPLY("b"), USER("c"), REPLY("d"), USER("e"), REPLY("f")]
    assert trained_texts(tmp_path, dialogue, train_on="last") == [[f"f{END}"]]
    tokenizer = byte_tokenizer(END, CHATML)
    masks = {
        (0, 1, 0, 0, 0, 1): ["b", "f"],
        (0, 0, 0, 1, 0, 0): ["d"],
        (1, 1, 1, 1, 1, 1): ["b", "d", "f"],
    }
    for form in ("jsonl", "csv", "parquet"):
        for mask, texts in masks.items():
            path = put(
                tmp_path / f"m{sum(mask)}.{form}", [{"messages": dialogue, "loss_mask": [*mask]}]
            )
            (row,) = sft_dataset(SFTConfig(data_path=[path], **only("sft")), tokenizer)
            assert trained(tokenizer, row) == [text + END for text in texts]
    path = put(tmp_path / "bad.jsonl", [{"messages": dialogue, "loss_mask": [1, 0]}])
    with pytest.raises(UserError, match="a loss_mask of 2 numbers for 6 turns"):
        sft_dataset(SFTConfig(data_path=[path], **only("sft")), tokenizer)


# -- variables of the template

THINKS = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)
QUIET = "<think>\n\n</think>\n\n"


def completed(template, **flags):
    return complete_tokenizer(
        CheckpointFiles("x", "--model"), byte_tokenizer(END, template), **flags
    )


def test_variables_become_the_saved_templates_defaults(tmp_path):
    tokenizer = completed(THINKS, chat_template_kwargs={"enable_thinking": False})
    for _ in range(2):  # again after it was saved, with the same flags
        text = tokenizer.decode(prompt_text_ids(tokenizer, [USER("u")]))
        assert text.endswith(f"<|im_start|>assistant\n{QUIET}")
        loud = prompt_text_ids(tokenizer, [USER("u")], enable_thinking=True)
        assert tokenizer.decode(loud).endswith("<|im_start|>assistant\n")
        plain = completed(THINKS)
        assert same_tokens(tokenizer, plain)
        assert same_tokens(plain, tokenizer)
        template = tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path)
        tokenizer = complete_tokenizer(
            CheckpointFiles(str(tmp_path), "--model"),
            AutoTokenizer.from_pretrained(tmp_path),
            chat_template_kwargs={"enable_thinking": False},
        )
        assert tokenizer.chat_template == template
    later = completed(template, chat_template_kwargs={"enable_thinking": True})
    assert not later.decode(prompt_text_ids(later, [USER("u")])).endswith(QUIET)


def test_several_variables_are_put_in_front_once():
    loud = "{% if shouts %}!{% endif %}"
    values = {"enable_thinking": False, "shouts": True}
    tokenizer = completed(loud + THINKS, chat_template_kwargs=values)
    template = tokenizer.chat_template
    complete_tokenizer(CheckpointFiles("x", "--m"), tokenizer, chat_template_kwargs=values)
    assert tokenizer.chat_template == template
    text = tokenizer.decode(prompt_text_ids(tokenizer, [USER("u")]))
    assert text.startswith("!")
    assert text.endswith(QUIET)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"enable_thinkng": False}, "reads no enable_thinkng"),
        ({"messages": []}, "messages is no variable"),
        ({"a b": 1}, "a b is no variable"),
    ],
)
def test_other_names_are_refused(values, problem):
    with pytest.raises(UserError, match=f"chat_template_kwargs: .*{problem}"):
        completed(THINKS, chat_template_kwargs=values)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_rows_own_variables(tmp_path, form):
    tokenizer = byte_tokenizer(END, THINKS)
    rows = [
        {"messages": [USER("u"), REPLY("r")], "chat_template_kwargs": {"enable_thinking": v}}
        for v in (False, True)
    ]
    path = put(tmp_path / f"rows.{form}", rows)
    made = prompt_dataset(RLHFConfig(data_path=[path], **only("rlhf")), tokenizer)
    texts = sorted(tokenizer.decode(row["prompt_ids"]) for row in made)
    assert [QUIET in text for text in texts] == [False, True]
    with pytest.raises(UserError, match="later turns would lack"):
        prompt_dataset(
            RLHFConfig(data_path=[path], environment="e.py:E", **only("rlhf")), tokenizer
        )
    (bad,) = put_rows(tmp_path, [{**rows[0], "chat_template_kwargs": {"tools": []}}])
    with pytest.raises(UserError, match="tools is no variable of a chat template"):
        sft_dataset(SFTConfig(data_path=[bad], **only("sft")), tokenizer)


def put_rows(folder, rows):
    return [put(folder / "more.jsonl", rows)]


# -- system messages

REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
IGNORES = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")


@pytest.mark.parametrize("template", [REFUSES, IGNORES])
def test_a_system_message_without_a_place_goes_to_the_first_user_turn(tmp_path, template, caplog):
    tokenizer = completed(template)
    chats = [[SYSTEM("be brief"), USER("u"), REPLY("r")], [USER("v"), REPLY("r")]]
    path = put(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    with caplog.at_level(logging.INFO, "dschat"):
        rows = sft_dataset(SFTConfig(data_path=[path], **only("sft")), tokenizer)
        prompts = prompt_dataset(RLHFConfig(data_path=[path], **only("rlhf")), tokenizer)
    assert caplog.text.count("1 had the system message put in front of the first user turn") == 2
    asked = "<|im_start|>user\nbe brief\n\nu<|im_end|>\n<|im_start|>assistant\n"
    assert {tokenizer.decode(row["input_ids"]) for row in rows} >= {f"{asked}r{END}"}
    assert asked in {tokenizer.decode(row["prompt_ids"]) for row in prompts}
    assert (
        tokenizer.decode(prompt_text_ids(tokenizer, chats[0][:2])) == asked
    )  # chat, serve, generate
    tokenizer.save_pretrained(tmp_path)  # and other programs, with the saved template
    assert (
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            chats[0][:2], tokenize=False, add_generation_prompt=True
        )
        == asked
    )
    refusing = completed(template, system_message="refuse")
    assert refusing.chat_template == template
    assert completed(CHATML).chat_template == CHATML


def test_a_held_out_set_that_empties_only_warns(tmp_path, caplog):
    tokenizer = completed(REFUSES, system_message="refuse")
    files = [
        put(
            tmp_path / f"{i}.jsonl",
            [{"prompt": [*system, USER("u")], "chosen": [REPLY("r")], "rejected": [REPLY("s")]}],
        )
        for i, system in enumerate(([], [SYSTEM("s")]))
    ]
    knobs = {"data_path": files[:1], "eval_data_path": files[1:]}
    for config, make in (
        (SFTConfig(**{**only("sft"), **knobs}), sft_dataset),
        (RewardConfig(**{**only("reward"), **knobs}), preference_dataset),
        (RLHFConfig(**{**only("rlhf"), **knobs}), prompt_dataset),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dschat"):
            train, held_out = make(config, tokenizer, "both")
        assert (len(train), len(held_out)) == (1, 0)
        assert "no held-out rows are left" in caplog.text
        assert "no system" in caplog.text
    with pytest.raises(UserError, match="no rows are left"):
        sft_dataset(SFTConfig(data_path=files[1:], **only("sft")), tokenizer)


def test_the_flag_takes_json():
    from dschat.config import parser

    words = ["--output_dir", "x", "--model_name_or_path", "m", "--chat_template_kwargs"]
    config = parser.parse(SFTConfig, [*words, json.dumps({"enable_thinking": False})])
    assert config.chat_template_kwargs == {"enable_thinking": False}
    for bad in ("enable_thinking=false", "[1]", "3"):
        with pytest.raises(UserError, match="--chat_template_kwargs .* is not of the form"):
            parser.parse(SFTConfig, [*words, bad])
