"""Templates that read messages in another form than most, or open a thought in their prompt."""

import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import only, put
from dialogues import REPLY, USER

from dschat.config import SFTConfig
from dschat.data.segments import prompt_text_ids
from dschat.data.tokenize import sft_dataset
from dschat.models.tokenizer import stop_ids

END = "<|im_end|>"
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
CALLED = {**REPLY(""), "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "told"}


def texts(folder, messages, template, **knobs):
    path = put(folder / "rows.jsonl", [{"messages": messages}])
    tokenizer = byte_tokenizer("</s>", template)
    config = SFTConfig(data_path=[path], max_seq_len=2000, **only("sft"), **knobs)
    return [trained(tokenizer, row) for row in sft_dataset(config, tokenizer)]


# as Idefics 3: a text as content is skipped, letter by letter
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% for p in m['content'] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
)


def test_contents_as_parts(tmp_path):
    assert texts(tmp_path, [USER("u"), REPLY("r")], PARTS) == [[f"r{END}"]]
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
    dialogue = [USER("u"), CALLED, TOLD, REPLY("r")]
    assert texts(tmp_path, dialogue, JOINS) == [[f'<call>add{{"a": "é"}}{END}', f"r{END}"]]


# as DeepSeek R1 and V3: the prompt opens a thought, and answers are rendered without
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSED = OPENS.replace(
    "{{ m['content'] }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "answer"), [(OPENS, f"</think>\n\nr{END}"), (CLOSED, f"</think>r{END}")]
)
def test_an_answer_without_a_thought_ends_the_one_that_its_prompt_opens(tmp_path, template, answer):
    assert texts(tmp_path, [USER("u"), REPLY("r")], template) == [[answer]]
    twice = [USER("u"), REPLY("r"), USER("u"), REPLY("r")]
    assert texts(tmp_path, twice, template) == [[answer], [answer]]


# as gpt-oss: thoughts are turns of their own, and a block in the content is content
CHANNELS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.thinking %}<a>{{ m.thinking }}</a>{% endif %}{{ m['content'] }}",
)


@pytest.mark.parametrize("answer", [{**REPLY("r"), "thinking": "hm"}, REPLY("<think>hm</think>r")])
def test_a_thought_in_the_content_is_rendered_as_the_template_renders_thoughts(tmp_path, answer):
    dialogue = [USER("u"), answer]
    assert texts(tmp_path, dialogue, CHANNELS) == [[f"<a>hm</a>r{END}"]]
    assert texts(tmp_path, dialogue, CHANNELS, train_on_reasoning=False) == [[f"r{END}"]]
    assert texts(tmp_path, dialogue, CHANNELS, reasoning="drop") == [[f"r{END}"]]
