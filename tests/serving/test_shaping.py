"""Biases, penalties, forbidden tokens and JSON, each seen in greedy answers."""

import json
from random import Random
from types import SimpleNamespace

import pytest
import torch
from http_client import answered, ask

from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.openai_api.schema import CompletionRequest
from dschat.openai_api.shaping import _why, shape_of

PROMPT = "tell me about the sun"


def complete(served, **body):
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 0} | body
    return answered(served, asked)["choices"][0]


def ids_of(served, choice):
    """The answer's tokens, which `logprobs` names."""
    tokenizer = served.model.tokenizer
    return tokenizer.encode(choice["text"], add_special_tokens=False)


def shaped(served, logits, answer, **body):
    """``logits`` as the next token of ``answer`` would be drawn from them."""
    tokenizer, prompt = served.model.tokenizer, [5, 6, 7]
    shape = shape_of(CompletionRequest(prompt="a", **body), tokenizer, len(logits))
    request = Request(prompt, SamplingParams())
    request.sequences[0].answer = answer
    return shape(request.sequences[0], logits)


def test_a_bias_decides(served):
    token = served.model.tokenizer.encode(" moon", add_special_tokens=False)[0]
    found = complete(served, logit_bias={str(token): 100}, max_tokens=3, min_tokens=2)
    assert ids_of(served, found) == [token] * 3
    assert all(value < 0 for value in found["logprobs"]["token_logprobs"])  # of the logits alone


def test_only_allowed_tokens_are_drawn(served):
    allowed = served.model.tokenizer.encode(" sun moon star", add_special_tokens=False)
    found = complete(served, allowed_token_ids=allowed, temperature=1, seed=1)
    assert set(ids_of(served, found)) <= set(allowed)


def test_penalties_are_those_of_vllm(served):
    """Of hand-made logits: prompt 5, 6, 7; answer 3, 3, 6."""
    logits = torch.tensor([0.5, -1.0, 2.0, 4.0, 0.0, 3.0, -2.0, 1.0])
    found = shaped(
        served,
        logits,
        [3, 3, 6],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={"0": 1.5},
    )
    expected = [2.0, -1.0, 2.0, 4 / 2 - 0.5 - 2 * 0.25, 0.0, 3 / 2, -2 * 2 - 0.5 - 0.25, 1 / 2]
    assert found.tolist() == pytest.approx(expected)
    assert logits[3] == 4.0


def test_forced_tokens_are_the_prompts():
    """Of an echo: repetition counts them, presence and frequency do not."""
    body = CompletionRequest(prompt="a", presence_penalty=0.5, repetition_penalty=2.0)
    shape = shape_of(body, None, 6)
    request = Request([5], SamplingParams(), forced=[3])
    request.sequences[0].answer = [3, 4]
    assert shape(request.sequences[0], torch.ones(6)).tolist() == [1, 1, 1, 0.5, 0, 0.5]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["sun", "moon"]},
        "planets": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "planets"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5, "n": 3}])
def test_json_of_a_schema(served, sampling):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "star", "schema": SCHEMA}}
    body = {"prompt": PROMPT, "max_tokens": 120, "response_format": wanted} | sampling
    for choice in answered(served, body)["choices"]:
        value = json.loads(choice["text"])
        assert value["name"] in ("sun", "moon")
        assert 0 <= value["planets"] <= 99
        assert choice["finish_reason"] == "stop"


def test_a_request_that_allows_nothing_leaves_the_others_alone(served):
    """JSON of tokens that are all forbidden, and an answer that goes on behind its JSON."""
    pytest.importorskip("llguidance")
    wanted, plain = {"type": "json_object"}, complete(served)["text"]
    token = served.model.tokenizer.encode(" moon", add_special_tokens=False)
    body = {"prompt": PROMPT, "response_format": wanted, "allowed_token_ids": token}
    assert ask(served, "/v1/completions", body)[0] == 400
    braces = served.model.tokenizer.encode("{}", add_special_tokens=False)
    body = {"response_format": wanted, "allowed_token_ids": braces, "ignore_eos": True}
    assert complete(served, **body)["text"].startswith("{}")
    assert complete(served)["text"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_no_answer_can_follow_to_its_end(stream, served):
    """The second token has none to choose from: an error, not free text."""
    pytest.importorskip("llguidance")
    opened = served.model.tokenizer.encode("{", add_special_tokens=False)
    body = {"prompt": PROMPT, "response_format": {"type": "json_object"}, "stream": stream, "n": 2}
    status, _, text = ask(served, "/v1/completions", body | {"allowed_token_ids": opened})
    assert status == (200 if stream else 400)
    last = text.decode().split("\n\n")[-3].removeprefix("data: ") if stream else text
    error = json.loads(last)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("response_format: no answer can follow it (")


def test_several_prompts_share_a_format(served, monkeypatch):
    """What is made once for all of them knows how far each answer is."""
    llguidance = pytest.importorskip("llguidance")
    made = []
    build = llguidance.LLMatcher.grammar_from_json_schema

    def count(*args, **options):
        made.append(1)
        return build(*args, **options)

    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_json_schema", count)
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    body = {"prompt": ["sun", "moon", "star"], "n": 2, "max_tokens": 120, "seed": 5}
    choices = answered(served, body | {"response_format": wanted})["choices"]
    assert len(choices) == 6
    assert all(json.loads(choice["text"])["name"] in ("sun", "moon") for choice in choices)
    assert made == [1]


def test_random_masks_are_those_of_a_plain_loop(served):
    """Allowed tokens, bad words of several lengths and biases, against vLLM's order, in words."""
    random, tokenizer = Random(0), served.model.tokenizer
    num_tokens = len(tokenizer)
    for case in range(60):
        allowed = random.choices(range(num_tokens), k=random.choice([0, 500])) or None
        bias = {str(i): random.uniform(-5, 5) for i in random.sample(range(num_tokens), 7)}
        logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(case))
        expected = logits.tolist()
        for token in range(num_tokens):
            if allowed and token not in allowed:
                expected[token] = -torch.inf
            expected[token] += bias.get(str(token), 0.0)
        body = {"allowed_token_ids": allowed, "logit_bias": bias}
        found = shaped(served, logits, [3], **body)
        assert found.tolist() == pytest.approx(expected, rel=1e-5), case


@pytest.mark.parametrize(("told", "why"), [("", "tokens are forbidden"), ("no:\nmore", "(no)")])
def test_why_a_format_cannot_be_followed(told, why):
    assert why in _why(SimpleNamespace(get_error=lambda: told))


def test_a_json_object_in_a_chat_beside_other_requests(served):
    pytest.importorskip("llguidance")
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": {"type": "json_object"},
        "logit_bias": {str(served.model.tokenizer.encode("}", add_special_tokens=False)[-1]): 50},
        "max_tokens": 30,
    }
    (choice,) = answered(served, body, "/v1/chat/completions")["choices"]
    assert json.loads(choice["message"]["content"]) == {}
