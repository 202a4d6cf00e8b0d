"""An observation's tokens: what the chat template puts between two answers, for any text."""

from pathlib import Path

import pytest
import tool_templates
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dschat.builtin.tiny_model import resolve_model
from dschat.config import UserError
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.environments.contract import Observation, ToolResult
from dschat.environments.template_text import ObservationTokens

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<h>' + m.role + '</h>\n\n' + m.content | trim + '<eot>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
THINKS = (  # removes the thoughts of earlier answers, as Qwen3's does
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama-3": (LLAMA_3, "<eot>"),
    "llama-2": (LLAMA_2, "</s>"),
    "thinks": (THINKS, "<|im_end|>"),
    "default": (None, "<|end|>"),
}


def tokenizer_of(name):
    return tool_templates.tokenizer_of(*TEMPLATES[name], ["<|im_start|>", "<s>", "<h>", "</h>"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_is_the_rendered_chat(name):
    """Prompt, answer with EOS, observation, in tokens, are the chat of three turns that waits for
    the next answer.
    """
    tokenizer = tokenizer_of(name)
    observations = ObservationTokens(tokenizer, is_chat=True)

    @settings(max_examples=40, deadline=None)
    @given(*[st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1)] * 3)
    def check(asked, answered, said):
        asked, answered, said = (text.strip() or "x" for text in (asked, answered, said))
        prompt = [{"role": "user", "content": asked}]
        ids = prompt_text_ids(tokenizer, prompt)
        before, after = {"llama-2": " ", "default": " "}.get(name, ""), " " * (name == "llama-2")
        ids += tokenizer.encode(f"{before}{answered}{after}", add_special_tokens=False)
        ids += [tokenizer.eos_token_id, *observations(Observation(said))]
        answer = {"role": "assistant", "content": answered}
        whole = [*prompt, answer, {"role": "user", "content": said}]
        expected = tokenizer.decode(prompt_text_ids(tokenizer, whole))
        assert tokenizer.decode(ids) == expected

    check()


def test_a_turn_that_begins_with_the_end_of_the_answer_before_it():
    """As GLM-4.5, whose answers end with the token of the next turn's role."""
    roles = ["<|user|>", "<|assistant|>", "<|observation|>", "</tool_call>", "</arg_value>"]
    template = (Path(__file__).parents[1] / "data/chat_templates/glm4moe.jinja").read_text("utf-8")
    tokenizer = tool_templates.tokenizer_of(template, "<|endoftext|>", roles)
    observations = ObservationTokens(tokenizer, is_chat=True)
    function = {"name": "search", "arguments": {"query": "oslo"}}
    answered = {"role": "assistant", "content": "five"}
    called = {**answered, "tool_calls": [{"type": "function", "function": function}]}
    result = ToolResult("search", "COLD")
    for answer, said, turn in (
        (answered, Observation("why?"), {"role": "user", "content": "why?"}),
        (called, Observation(results=(result,)), {"role": "tool", "content": "COLD"}),
    ):
        (row,) = encode_examples(tokenizer, [Example([{"role": "user", "content": "?"}], [answer])])
        ids = [*row.prompt_ids, *row.answers[0], *observations(said)]
        whole = [{"role": "user", "content": "?"}, answer, turn]
        assert ids == prompt_text_ids(tokenizer, whole)


def test_text_is_all_there_is_without_a_chat():
    tokenizer = tokenizer_of("chatml")
    said = ObservationTokens(tokenizer, is_chat=False)(Observation("12\n"))
    assert tokenizer.decode(said) == "12\n"
    assert tokenizer.eos_token_id not in said


def test_the_builtin_model():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin/tiny"))
    prompt = [{"role": "user", "content": "what is the sun?"}]
    answer, said = "a star", "and the moon?"
    ids = prompt_text_ids(tokenizer, prompt) + tokenizer.encode(answer, add_special_tokens=False)
    ids += [tokenizer.eos_token_id, *ObservationTokens(tokenizer, is_chat=True)(Observation(said))]
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    assert ids == prompt_text_ids(tokenizer, prompt + turns)


def test_a_template_without_a_place_for_it():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match="--environment: the chat template does not render"):
        ObservationTokens(tokenizer, is_chat=True)


def test_half_a_character_is_a_question_mark():
    """A tool may repeat what a model wrote in JSON's escapes, which is no text."""
    tokens = ObservationTokens(tokenizer_of("chatml"), is_chat=True)
    assert tokens(Observation("a\ud83db")) == tokens(Observation("a?b"))
