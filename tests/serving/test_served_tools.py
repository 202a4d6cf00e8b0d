"""Tools in chats: shown to the model, and its calls in OpenAI's form, whole and streamed."""

import json

import pytest
import torch

from dschat.data.segments import prompt_text_ids
from dschat.serving import app

openai = pytest.importorskip("openai")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "what is 1 + 2?"}
CALL = 'let me see <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def says(monkeypatch, served):
    """``says(text)``: what the model writes in the requests that follow."""

    def say(text):
        tokenizer = served.model.tokenizer
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        def shape(sequence, logits):
            forced = torch.full_like(logits, -torch.inf)
            forced[ids[len(sequence.answer)]] = 0.0
            return forced

        monkeypatch.setattr(app, "shape_of", lambda *_: shape)

    return say


def ask(client, **options):
    asked = {"model": "tiny", "messages": [QUESTION], "tools": [ADD], "max_tokens": 200}
    return client.chat.completions.create(**asked | options)


def test_a_call(client, says):
    says(CALL)
    (choice,) = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "let me see")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1}
    assert call.id


def test_a_call_alone_has_no_content(client, says):
    says(CALL.removeprefix("let me see "))
    (choice,) = ask(client).choices
    assert choice.message.content is None
    assert choice.message.tool_calls


def test_a_call_in_an_answer_that_was_cut_is_text(client, served, says):
    """Who runs it would not know of what follows."""
    says(CALL + " sun moon")
    length = len(served.model.tokenizer.encode(CALL + " sun", add_special_tokens=False))
    (choice,) = ask(client, max_tokens=length).choices
    assert (choice.message.content, choice.finish_reason) == (CALL + " sun", "length")
    assert choice.message.tool_calls is None


def test_two_calls_streamed(client, says):
    says(CALL + CALL.removeprefix("let me see "))
    chunks = list(ask(client, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add"), (1, "add")]
    assert [c.function.arguments for c in calls] == ['{"a": 1}'] * 2
    assert "".join(delta.content or "" for delta in deltas) == "let me see"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ["it is 3", 'odd <tool_call>{"name": "add", "arguments": {'])
@pytest.mark.parametrize("stream", [False, True])
def test_other_answers_stay_text(client, says, text, stream):
    """Also a call that cannot be read."""
    says(text)
    answer = ask(client, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        content = "".join(choice.delta.content or "" for choice in choices)
        assert not any(choice.delta.tool_calls for choice in choices)
    else:
        choices = answer.choices
        content = choices[0].message.content
        assert choices[0].message.tool_calls is None
    assert (content.strip(), choices[-1].finish_reason) == (text, "stop")


def test_the_model_reads_tools_calls_and_results_as_in_training(client, served):
    """The prompt's ids are those of training, with arguments as an object."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[ADD], max_tokens=1
    )
    read = call | {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    ids = prompt_text_ids(served.model.tokenizer, turns, tools=[ADD])
    assert answer.usage.prompt_tokens == len(ids)


def test_the_template_gets_a_tool_as_it_came(client, monkeypatch):
    """With the order of its keys, which the rows of training keep too."""
    seen = []

    def shown(*args, tools, **inputs):
        seen.append(tools)
        return prompt_text_ids(*args, tools=tools, **inputs)

    monkeypatch.setattr(app, "prompt_text_ids", shown)
    function = {"strict": True, "description": "Add.", "parameters": {"b": 1, "a": 2}, "name": "f"}
    tools = [{"function": function, "cached": None, "type": "function"}, ADD]
    tools.append({"type": "function", "function": {"name": "now"}})
    client.chat.completions.create(model="tiny", messages=[QUESTION], tools=tools, max_tokens=1)
    assert json.dumps(seen) == json.dumps([tools])
    for bad, place in (({"type": "function"}, "tools.0.function"), (3, "tools.0")):
        with pytest.raises(openai.BadRequestError, match=place):
            client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[bad])


@pytest.mark.parametrize("by_prompt", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_a_thought_is_text(client, served, says, by_prompt, stream):
    """What stands behind the thought is not lost, and a call there is one."""
    thought = f"{CALL} would do.</think>"
    each = (served.model.tokenizer, served.model.encoder)
    before = each[0].chat_template
    opens = "{% if add_generation_prompt and thinks %}<think>{% endif %}"
    for tokenizer in each:
        tokenizer.chat_template = before + opens
    try:
        for end, count in ((" It is 3.", 0), (f" {CALL}", 1)):
            says(text := ("" if by_prompt else "<think>") + thought + end)
            kwargs = {"chat_template_kwargs": {"thinks": by_prompt}}
            answer = ask(client, stream=stream, extra_body=kwargs)
            parts = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
            assert sum(len(part.tool_calls or ()) for part in parts) == count
            content = "".join(part.content or "" for part in parts).strip()
            assert content == (text.removesuffix(CALL.removeprefix("let me see")).strip())
    finally:
        for tokenizer in each:
            tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("begun", "count"),
    [
        ("Sure:", 1),
        ("<think>Hm.</think>", 1),
        ("One step: <think>", 0),
        ("<think></think><think>", 0),
    ],
)
def test_a_call_in_an_answer_that_was_begun(client, served, says, begun, count):
    """What was begun says whether it is in a thought, not the template, which opens one here."""
    each = (served.model.tokenizer, served.model.encoder)
    before = each[0].chat_template
    for tokenizer in each:
        tokenizer.chat_template = before + "{% if add_generation_prompt %}<think>{% endif %}"
    messages = [QUESTION, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    try:
        says(CALL)
        (choice,) = ask(client, messages=messages, extra_body=fields).choices
        assert len(choice.message.tool_calls or ()) == count
    finally:
        for tokenizer in each:
            tokenizer.chat_template = before


def test_a_template_that_shows_no_tools(client, served, monkeypatch):
    """A field of the request is named, not the flag of training."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.model.encoder, "chat_template", template)
    with pytest.raises(openai.BadRequestError) as error:
        ask(client)
    assert error.value.body["message"].startswith("tools: the chat template does not show tools")


def test_no_tools_are_shown_with_choice_none(client, served, says):
    says(CALL)
    name = "sun " * 2 * served.model.worker.engine.max_positions
    tools = [{"type": "function", "function": {"name": name}}]
    assert ask(client, tool_choice="none", tools=tools).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="too long for tiny by about"):
        ask(client, tools=tools)
    answer = ask(client, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(client, tool_choice="required")
