"""What a body asks for: values that clients of other servers send."""

import pytest

from dschat.openai_api.schema import ChatRequest

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("sent", "name", "meant"),
    [
        ({"stop": ""}, "stops", []),
        ({"stop": ["", "x"]}, "stops", ["x"]),
        ({"max_tokens": 3, "max_completion_tokens": 5}, "max_new_tokens", 5),
        ({"max_tokens": 3}, "max_new_tokens", 3),
        ({"top_logprobs": 3}, "num_top", 0),
        ({"top_logprobs": 3, "logprobs": True}, "num_top", 3),
    ],
)
def test_of_a_chat(sent, name, meant):
    assert getattr(ChatRequest(messages=MESSAGES, **sent), name) == meant


@pytest.mark.parametrize(
    ("sent", "name", "meant"),
    [
        ({"top_k": -1}, "top_k", 0),  # off
        ({"min_tokens": 9}, "min_new_tokens", 4),
        ({"min_tokens": 2}, "min_new_tokens", 2),
        ({"seed": 0}, "seed", 0),
        ({"temperature": 0}, "temperature", 0),
    ],
)
def test_sampling_of_four_tokens(sent, name, meant):
    body = ChatRequest(messages=MESSAGES, **sent)
    assert getattr(body.sampling(4), name) == meant
