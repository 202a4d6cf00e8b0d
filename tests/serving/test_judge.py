"""A judge that asks the project's own server."""

import pytest

from dschat.rewards.judge import Judge, JudgeGroup, VerdictCache


@pytest.mark.slow
def test_a_judge_asks_the_server(served, tmp_path, monkeypatch):
    """Random weights give no verdicts; their replies arrive, and one with a number is a rating."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    replies = []
    monkeypatch.setattr(VerdictCache, "add", lambda self, key, verdict, reply: None)
    monkeypatch.setattr(
        "dschat.rewards.judge.read_rating", lambda reply: replies.append(reply) or 0.25
    )
    knobs = {"url": f"{served.url}/v1", "model": "tiny", "cache": str(tmp_path), "retries": 0}
    body = {"stop": [*"aeiou "]}  # so that replies end
    one = Judge(rubric="Rate it.", max_tokens=64, body=body, **knobs)
    assert one(["why?"] * 3, ["so", "as", "it"]) == [0.25] * 3
    assert len(replies) == 3
    other = JudgeGroup(rubric="Compare.", max_tokens=4, **knobs)
    assert other(["why?"] * 2, ["so", "as"], [[1], [1]]) == [None, None]
