"""What a user may ask of chats: thoughts, answers with loss, variables of the template, and system
messages that it has no place for.
"""

import json

import pytest
from byte_tokenizers import CHATML, byte_tokenizer
from data_files import put, sft_rows, step_table, trained_texts
from dialogues import REPLY, SYSTEM, USER
from transformers import AutoTokenizer

from dschat.config import SFTConfig, UserError, parser
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.adapters import PURPOSES
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.tokenizer import complete_tokenizer, same_tokens, stop_ids

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


def texts_of(folder, messages, template=CHATML, **knobs):
    return trained_texts(folder, messages, byte_tokenizer(END, template), **knobs)


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
    (texts,) = texts_of(tmp_path, asked, template, reasoning=reasoning)
    assert texts == [expected]


@pytest.mark.parametrize(("template", "reasoning"), [(CHATML, "auto"), (CUTS, "keep")])
def test_a_thought_without_a_place_names_the_flag(tmp_path, template, reasoning):
    with pytest.raises(UserError, match="thoughts .* does not render; see --reasoning"):
        texts_of(tmp_path, [USER("2+2?"), THOUGHT], template, reasoning=reasoning)


@pytest.mark.parametrize("template", [FORGETS, CUTS])
def test_every_thought_of_a_dialogue_is_trained_where_the_template_forgets_them(tmp_path, template):
    turns = [(USER(f"q{i}"), {**REPLY(f"a{i}"), "reasoning_content": f"t{i}"}) for i in range(5)]
    dialogue = [turn for pair in turns for turn in pair]
    answers = [f"<think>\nt{i}\n</think>\n\na{i}{END}" for i in range(5)]
    assert texts_of(tmp_path, dialogue, template) == [[answer] for answer in answers]
    assert texts_of(tmp_path, dialogue, template, train_on="last") == [answers[-1:]]
    assert texts_of(tmp_path, dialogue, SHOWS) == [answers]


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
    made = step_table(path, tokenizer, "rlhf")
    texts = sorted(tokenizer.decode(row["prompt_ids"]) for row in made)
    assert [QUIET in text for text in texts] == [False, True]
    with pytest.raises(UserError, match="later turns would lack"):
        step_table(path, tokenizer, "rlhf", environment="e.py:E")
    with pytest.raises(UserError, match="tools is no variable of a chat template"):
        sft_rows(tmp_path, {**rows[0], "chat_template_kwargs": {"tools": []}}, tokenizer)


# -- system messages

REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
IGNORES = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")


@pytest.mark.parametrize("template", [REFUSES, IGNORES])
def test_a_system_message_without_a_place_goes_to_the_first_user_turn(tmp_path, template, log):
    tokenizer = completed(template)
    chats = [[SYSTEM("be brief"), USER("u"), REPLY("r")], [USER("v"), REPLY("r")]]
    path = put(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    rows, prompts = (step_table(path, tokenizer, purpose) for purpose in ("sft", "rlhf"))
    assert log.text.count("1 had the system message put in front of the first user turn") == 2
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


def test_a_held_out_set_that_empties_only_warns(tmp_path, log):
    tokenizer = completed(REFUSES, system_message="refuse")
    files = [
        put(
            tmp_path / f"{i}.jsonl",
            [{"prompt": [*system, USER("u")], "chosen": [REPLY("r")], "rejected": [REPLY("s")]}],
        )
        for i, system in enumerate(([], [SYSTEM("s")]))
    ]
    for purpose in PURPOSES:
        log.clear()
        train, held_out = step_table(
            files[:1], tokenizer, purpose, "both", eval_data_path=files[1:]
        )
        assert (len(train), len(held_out)) == (1, 0)
        assert "no held-out rows are left" in log.text
        refused = "a chat that the tokenizer's template refuses (no system)"
        assert f"1 dropped ({refused})" in log.text
    with pytest.raises(UserError, match="no rows are left"):
        step_table(files[1:], tokenizer)


def test_the_flag_takes_json():
    words = ["--output_dir", "x", "--model_name_or_path", "m", "--chat_template_kwargs"]
    config = parser.parse(SFTConfig, [*words, json.dumps({"enable_thinking": False})])
    assert config.chat_template_kwargs == {"enable_thinking": False}
    for bad in ("enable_thinking=false", "[1]", "3"):
        with pytest.raises(UserError, match="--chat_template_kwargs .* is not of the form"):
            parser.parse(SFTConfig, [*words, bad])


# -- templates that read messages in another form than most, or open a thought in their prompt

# as Idefics 3: a text as content is skipped, letter by letter
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% for p in m['content'] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
)


def test_contents_as_parts(tmp_path):
    assert texts_of(tmp_path, [USER("u"), REPLY("r")], PARTS) == [[f"r{END}"]]
    tokenizer = byte_tokenizer("</s>", PARTS)
    asked = tokenizer.decode(prompt_text_ids(tokenizer, [USER("u")]))
    assert asked == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids(END) in stop_ids(tokenizer)


# as DeepSeek V3: arguments are joined to text
JOINS = CHATML.replace(
    "{{ m['content'] }}",
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments }}"
    "{% endfor %}{{ m['content'] }}",
)


def test_arguments_as_json_text(tmp_path):
    function = {"name": "add", "arguments": {"a": "é"}}
    called = {**REPLY(""), "tool_calls": [{"function": function}]}
    dialogue = [USER("u"), called, {"role": "tool", "content": "told"}, REPLY("r")]
    assert texts_of(tmp_path, dialogue, JOINS) == [[f'<call>add{{"a": "é"}}{END}', f"r{END}"]]


# as DeepSeek R1 and V3: the prompt opens a thought, and answers are rendered without
BEGINS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSED = BEGINS.replace(
    "{{ m['content'] }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "answer"), [(BEGINS, f"</think>\n\nr{END}"), (CLOSED, f"</think>r{END}")]
)
def test_an_answer_without_a_thought_ends_the_one_that_its_prompt_opens(tmp_path, template, answer):
    assert texts_of(tmp_path, [USER("u"), REPLY("r")], template) == [[answer]]
    twice = [USER("u"), REPLY("r"), USER("u"), REPLY("r")]
    assert texts_of(tmp_path, twice, template) == [[answer], [answer]]


def test_a_variable_may_have_any_name():
    """Those of our own parameters too."""
    tokenizer = byte_tokenizer(END, CHATML + "{{ prompt }}{{ turn }}{{ tokenizer }}{{ closes }}")
    dialogue = [USER("u"), REPLY("r"), USER("u")]
    inputs = {"prompt": "a", "turn": "b", "tokenizer": "c", "closes": ""}
    ids = prompt_text_ids(tokenizer, dialogue, **inputs)
    assert tokenizer.decode(ids).endswith("assistant\nabc")


# as gpt-oss: thoughts are turns of their own, and a block in the content is content
CHANNELS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.thinking %}<a>{{ m.thinking }}</a>{% endif %}{{ m['content'] }}",
)


@pytest.mark.parametrize("answer", [{**REPLY("r"), "thinking": "hm"}, REPLY("<think>hm</think>r")])
def test_a_thought_in_the_content_is_rendered_as_the_template_renders_thoughts(tmp_path, answer):
    dialogue = [USER("u"), answer]
    assert texts_of(tmp_path, dialogue, CHANNELS) == [[f"<a>hm</a>r{END}"]]
    assert texts_of(tmp_path, dialogue, CHANNELS, reasoning="drop") == [[f"r{END}"]]
