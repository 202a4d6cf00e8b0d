"""Other clients of the server: lm-evaluation-harness's, which gets the numbers of its ``hf`` model,
and the judge.
"""

import pytest

from dschat.builtin.tiny_model import resolve_model
from dschat.rewards.judge import Judge, JudgeGroup

pytestmark = pytest.mark.slow  # the library takes seconds to load

TEXTS = [
    ("The sun is", " a star"),
    ("The moon", " is not a star, and nobody lives there."),
    ("", "what is 1 + 2?"),
    ("Q: what is 12 + 7?\nA:", " 19"),
]


@pytest.fixture
def models(served, monkeypatch):
    """The ``hf`` model, and the server as lm-evaluation-harness asks it."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    path = resolve_model("builtin/tiny")
    hf = huggingface.HFLM(pretrained=path, device="cpu", dtype="float32", batch_size=1)
    api = completions.LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="tiny",
        tokenizer=path,
        tokenizer_backend="huggingface",
        max_length=512,
        batch_size=2,
    )
    return hf, api


def instances(kind, rows):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, row, i) for i, row in enumerate(rows)]


def test_log_likelihoods(models):
    hf, api = (model.loglikelihood(instances("loglikelihood", TEXTS)) for model in models)
    assert [value for value, _ in api] == pytest.approx([value for value, _ in hf], abs=1e-3)
    assert [greedy for _, greedy in api] == [greedy for _, greedy in hf]


def test_rolling_log_likelihoods(models):
    rows = [("".join(text),) for text in TEXTS[1:]]
    hf, api = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", rows)) for model in models
    )
    assert api == pytest.approx(hf, abs=1e-3)


def test_answers(models):
    options = {"until": ["\n", "."], "max_gen_toks": 24, "do_sample": False}
    rows = [(context, options) for context, _ in TEXTS if context]
    hf, api = (model.generate_until(instances("generate_until", rows)) for model in models)
    assert [text.strip() for text in api] == [text.strip() for text in hf]


def test_a_judge_asks_the_server(served, monkeypatch):
    """Random weights write the number that a schema forces, and otherwise no verdict."""
    pytest.importorskip("llguidance")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    knobs = {"url": f"{served.url}/v1", "model": "tiny", "retries": 0}
    schema = {"name": "rating", "schema": {"const": "[[7]]"}}
    wanted = {"type": "json_schema", "json_schema": schema}
    body = {"response_format": wanted}
    one = Judge(rubric="Rate it.", max_tokens=64, body=body, **knobs)
    assert one(["why?"] * 3, ["so", "as", "it"]) == [pytest.approx(6 / 9)] * 3
    other = JudgeGroup(rubric="Compare.", max_tokens=4, **knobs)
    assert other(["why?"] * 2, ["so", "as"], [[1], [1]]) == [None, None]
