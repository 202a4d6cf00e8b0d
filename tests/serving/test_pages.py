"""What a web page of another origin sends without asking: nothing of it is taken."""

import json
from pathlib import Path

import pytest
from http_client import ask

PREFERENCE = {"messages": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another server of this machine
        ({"Origin": "http://127.0.0.1:PORT"}, 204),
        ({}, 204),
    ],
)
def test_preferences_of_other_pages(headers, status, served):
    path = Path(served.config.preferences)
    before = path.read_bytes() if path.exists() else b""
    headers = {k: v.replace("PORT", str(served.port)) for k, v in headers.items()}
    assert ask(served, "/api/preference", PREFERENCE, **headers)[0] == status
    after = path.read_bytes() if path.exists() else b""
    assert len(after[len(before) :].splitlines()) == (status == 204)


def test_pages_that_are_allowed(open_to_a_page):
    served, page = open_to_a_page, "http://page.example"
    body = {"prompt": "a", "max_tokens": 1}
    status, headers, text = ask(served, "/v1/completions", body, Origin=page)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, page), text
    status, _, text = ask(served, "/v1/completions", body, Origin="http://other.example")
    assert (status, "--allow_origin" in json.loads(text)["error"]["message"]) == (403, True)
