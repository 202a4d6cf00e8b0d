"""Scores and preferences of the web chat, without a browser; nothing is taken of what a page of
another origin sends without asking.
"""

import hashlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from http_client import answered, ask
from starlette.testclient import TestClient

from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.data.sources.adapters import Example
from dschat.data.sources.splits import load_examples
from dschat.serving import web_chat
from dschat.serving.app import create_app
from dschat.serving.web_chat import ChatScorer, Preference, PreferenceFile

MESSAGES = [{"role": "user", "content": "what is the sun?"}]
PREFERENCE = {"messages": MESSAGES, "chosen": "b", "rejected": "c"}


def test_scores_are_those_of_the_model(compared):
    """Against transformers' own pooling of the last token."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    answers = ["a star", "I do not know what that is"]
    scored = answered(compared, {"messages": MESSAGES, "answers": answers}, "/api/score")
    path = compared.config.reward_model
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    for score, answer in zip(scored["scores"], answers, strict=True):
        turns = [*MESSAGES, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        assert ids[-1] == tokenizer.eos_token_id or tokenizer.eos_token_id in ids[-3:]
        ids = ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.item()
        assert score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("num_turns", "about"), [(100, "about "), (20, "")])
def test_a_conversation_that_is_far_too_long(num_turns, about, compared):
    """It is refused before its answers are rendered one by one, as it is without a reward model."""
    turns = [{"role": role, "content": "sun " * 9} for role in ("user", "assistant") * num_turns]
    body = {"messages": [*turns, *MESSAGES], "answers": ["a"]}
    status, _, text = ask(compared, "/api/score", body)
    assert (status, f"too long for the reward model by {about}" in text.decode()) == (400, True)
    assert re.search(rf"has {about}\d", text.decode())


def test_a_conversation_that_just_fits_is_scored(compared):
    scorer = ChatScorer(compared.config.reward_model, "fp32")
    scorer._positions = 8
    with pytest.raises(UserError) as error:
        scorer.score(MESSAGES, ["a"])
    scorer._positions = int(re.search(r"has (\d+)", str(error.value))[1])
    assert len(scorer.score(MESSAGES, ["a"])) == 1
    scorer._positions -= 1
    with pytest.raises(UserError, match=r"by 1 tokens"):
        scorer.score(MESSAGES, ["a"])


def test_a_preference_is_a_row_of_step_2(compared, own_cache):
    body = {
        "messages": [{"role": "system", "content": "be brief"}, *MESSAGES],
        "chosen": "a star\n☀",
        "rejected": "no idea",
        "chosen_model": "tiny",
        "rejected_model": "other",
    }
    for _ in range(2):
        assert ask(compared, "/api/preference", body)[0] == 204
    path = compared.config.preferences
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert rows[-1]["chosen_model"] == "tiny"
    config = DataConfig(data_path=[path], eval_fraction=0.0, data_split="0,1,0")
    train, _ = load_examples(config, "reward")
    example = Example.from_row(train[-1])
    assert example.prompt == body["messages"]
    assert example.chosen == [{"role": "assistant", "content": "a star\n☀"}]
    assert example.rejected == [{"role": "assistant", "content": "no idea"}]


def test_the_page_is_whole_and_refers_to_nothing(served):
    status, headers, text = ask(served, "/", b"", "GET")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"] == (
        "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page, folder = text.decode(), web_chat._FILES
    vendored = {path.name: path.read_text() for path in folder.glob("vendor/*.js")}
    assert len(vendored) == 2
    for name, script in vendored.items():
        assert f"<script>{script}</script>" in page
        assert not re.search("</?script", script, re.I)  # it would end the page's element
        assert (
            hashlib.sha256(script.encode()).hexdigest() in (folder / "vendor/README.md").read_text()
        )
        assert (folder / f"vendor/LICENSE.{re.split('-[0-9]', name)[0]}").exists()
        page = page.replace(script, "")
    assert (folder / "chat.js").read_text() in page
    assert "{{" not in page
    named = re.findall(r"""(?:src|href|action|url|import)\b\s*[=(]\s*["']?([^"'\s>;)]+)""", page)
    assert set(named) <= {"data:,", "${escapeHtml(image.attrGet("}
    assert not re.search("https?://[a-z]", page)


def test_without_a_reward_model(served):
    body = {"messages": MESSAGES, "answers": ["a"]}
    status, _, text = ask(served, "/api/score", body)
    assert (status, "--reward_model" in text.decode()) == (404, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://["}, 400),
        ({"Origin": b"http://\xff"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another server of this machine
        ({"Origin": "http://127.0.0.1:PORT"}, 204),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 204),
        ({}, 204),
    ],
)
def test_preferences_of_other_pages(headers, status, served):
    path = Path(served.config.preferences)
    before = path.read_bytes() if path.exists() else b""
    if headers == {"Origin": "http://127.0.0.1:PORT"}:
        headers = {"Origin": f"http://127.0.0.1:{served.port}"}
    assert ask(served, "/api/preference", PREFERENCE, **headers)[0] == status
    after = path.read_bytes() if path.exists() else b""
    assert len(after[len(before) :].splitlines()) == (status == 204)


def test_preferences_that_cannot_be_written(served, monkeypatch, tmp_path, caplog):
    """OpenAI's body, and one line in the log."""
    monkeypatch.setattr(web_chat, "no_link", lambda *_: os.open(tmp_path, os.O_WRONLY))
    status, _, text = ask(served, "/api/preference", PREFERENCE)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (500, "server_error")
    assert "Is a directory" in error["message"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not caplog.records[0].exc_info


def test_a_full_disk_leaves_no_half_row(monkeypatch, tmp_path):
    """The first write takes what fits, the second one nothing."""
    preferences = PreferenceFile(str(tmp_path / "p.jsonl"))
    preferences.append(Preference(**PREFERENCE))
    before = preferences.path.read_bytes()

    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(web_chat, "open", lambda path, *_, **__: Full(path, "a"), raising=False)
        with pytest.raises(OSError, match="No space left"):
            preferences.append(Preference(**PREFERENCE))
    assert preferences.path.read_bytes() == before
    preferences.append(Preference(**PREFERENCE))
    assert preferences.path.read_bytes() == before * 2


def test_a_failure_of_the_server_has_openais_body(served, monkeypatch):
    monkeypatch.setattr(served.server, "model", None)
    status, _, text = ask(served, "/v1/completions", {"prompt": "a"})
    assert (status, json.loads(text)["error"]["type"]) == (500, "server_error")


def test_pages_that_are_allowed(start):
    page = "http://page.example"
    served = start(allow_origin=[page])
    body = {"prompt": "a", "max_tokens": 1}
    status, headers, text = ask(served, "/v1/completions", body, Origin=page)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, page), text
    status, _, text = ask(served, "/v1/completions", body, Origin="http://other.example")
    assert (status, "--allow_origin" in json.loads(text)["error"]["message"]) == (403, True)


def test_a_page_asks_without_its_key_what_it_may_send(start, tmp_path):
    """As a browser does, which keeps the key for the request itself."""
    page = "http://page.example"
    server = start(allow_origin=[page]).server
    app = create_app(server, ["right"], PreferenceFile(str(tmp_path / "p.jsonl")))
    client = TestClient(app, base_url="http://127.0.0.1")
    asks = {"Origin": page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    found = client.options("/v1/completions", headers=asks)
    assert (found.status_code, found.headers["Access-Control-Allow-Origin"]) == (200, page)
    assert client.get("/v1/models", headers={"Origin": page}).status_code == 401
