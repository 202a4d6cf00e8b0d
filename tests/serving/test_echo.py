"""``echo``: log-probs of the prompt's tokens, as evaluation libraries ask for them."""

import json

import pytest
import torch
from http_client import answered, ask
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.builtin.tiny_model import resolve_model

TEXT = "The sun is a star, and the moon is not."


@pytest.fixture(scope="module")
def module():
    path = resolve_model("builtin/tiny")
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def logprobs_of(module, ids):
    """(T - 1, V): what follows each of ``ids`` but the last."""
    with torch.no_grad():
        return module[0](torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def complete(served, **body):
    return answered(served, {"temperature": 0, "echo": True} | body)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_the_prompt_has_the_log_probs_of_a_forward(served, module, max_tokens):
    ids = module[1].encode(TEXT)
    answer = complete(served, prompt=TEXT, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert "".join(found["tokens"][: len(ids)]) == TEXT
    assert choice["text"].startswith(TEXT)
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    expected = logprobs_of(module, ids)
    drawn = expected.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(
        torch.tensor(found["token_logprobs"][1 : len(ids)], dtype=torch.float64),
        drawn,
        atol=1e-4,
        rtol=0,
    )
    best = expected.max(1).values.tolist()
    tops = [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]]
    assert tops == pytest.approx(best, abs=1e-4)
    counts = {"prompt_tokens": len(ids), "completion_tokens": max_tokens}
    assert answer["usage"] == counts | {"total_tokens": len(ids) + max_tokens}


def test_what_follows_is_the_answer_without_echo(served):
    """Also by sampling, with several answers, and for several prompts at once."""
    body = {"prompt": [TEXT, "moon"], "max_tokens": 12, "temperature": 1, "seed": 3, "n": 2}
    plain = complete(served, **body, echo=False)["choices"]
    echoed = complete(served, **body)["choices"]
    texts = [text for text in body["prompt"] for _ in range(2)]
    assert [c["text"] for c in echoed] == [t + c["text"] for t, c in zip(texts, plain, strict=True)]
    assert [c["finish_reason"] for c in echoed] == [c["finish_reason"] for c in plain]


def test_a_prompt_of_many_steps_ends_no_answer(served, module):
    """Longer than what a step computes, as ids, with EOS and a stop string within."""
    ids = (module[1].encode(TEXT) + [module[1].eos_token_id]) * 20
    body = {"prompt": ids, "logprobs": 1, "max_tokens": 0, "stop": "moon"}
    found = complete(served, **body)["choices"][0]["logprobs"]["token_logprobs"]
    drawn = logprobs_of(module, ids).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert found[1:] == pytest.approx(drawn.tolist(), abs=1e-4)


def test_a_stop_string_in_the_prompt_cuts_nothing(served):
    for max_tokens in (0, 3):
        body = {"prompt": TEXT, "max_tokens": max_tokens, "stop": ["not.", "moon", "."]}
        assert complete(served, **body)["choices"][0]["text"].startswith(TEXT)


def test_streams_hold_the_same(served):
    body = {"prompt": TEXT, "logprobs": 1, "max_tokens": 4, "temperature": 0, "echo": True}
    whole = complete(served, **body)["choices"][0]
    _, _, text = ask(served, "/v1/completions", body | {"stream": True})
    events = [json.loads(line[6:]) for line in text.decode().split("\n\n") if "choices" in line]
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    found = [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]]
    assert found == pytest.approx(whole["logprobs"]["token_logprobs"])


def test_no_tokens_without_echo_are_refused(served):
    status, _, text = ask(served, "/v1/completions", {"prompt": "sun", "max_tokens": 0})
    assert status == 400
    assert "max_tokens" in json.loads(text)["error"]["message"]
