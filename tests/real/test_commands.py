"""The commands that answer, with real models: chat, serve, generate and eval."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from python_process import ROOT, environment
from training_runs import run
from transformers import AutoModelForCausalLM

from dschat.models.tokenizer import stop_ids

pytestmark = pytest.mark.real

CAPITAL = "What is the capital of France?"
QUESTIONS = [CAPITAL, "Name three colours.", "Zähle bis fünf. 👍🏽"]
ENVIRONMENT = environment(OMP_NUM_THREADS="1", TERM="dumb")
NEW = 24


@pytest.fixture(scope="module")
def flags(folder, template) -> list[str]:
    return ["--path", str(folder), *(["--chat_template", template] if template else [])]


@pytest.fixture(scope="module")
@torch.no_grad()
def expected(folder, tokenizer) -> list[str]:
    """Greedy answers by transformers."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        out = module.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=list(stop_ids(tokenizer))
        )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        answers.append(text.strip())
    return answers


def test_the_answer_is_sensible(expected, folder):
    if "instruct" in folder.name:
        assert "Paris" in expected[0]
    assert all(expected)


def test_chat(flags, expected):
    argv = [sys.executable, str(ROOT / "chat.py"), *flags, "--greedy", "--max_new_tokens", str(NEW)]
    done = subprocess.run(
        argv, input="\n".join(QUESTIONS), env=ENVIRONMENT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.removesuffix("\n").split("\n")
    assert lines == [answer.replace("\n", "\\n") for answer in expected]


def test_generate_and_eval(flags, expected, tmp_path):
    data, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    rows = [
        {"question": question, "reference": answer}
        for question, answer in zip(QUESTIONS, expected, strict=True)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*flags, "--data_path", str(data), "--max_new_tokens", str(NEW), "--temperature", "0"]
    run(["-m", "dschat", "generate", *words, "--out", str(out)])
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == expected
    results = tmp_path / "results.json"
    scored = ["--task", "score", "--reward_fn", "exact_match", "--out", str(results)]
    run(["-m", "dschat", "eval", *words, *scored])
    (metric,) = json.loads(results.read_text())["metrics"]
    assert (metric["value"], metric["rows"]) == (1.0, len(QUESTIONS))


@contextmanager
def serving(flags, tmp_path):
    """The address of a server, which ends with code 0."""
    argv = [sys.executable, "-m", "dschat", "serve", *flags, "--port", "0", "--max_seq_len", "1024"]
    argv += ["--max_num_seqs", "4", "--preferences", str(tmp_path / "preferences.jsonl")]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        argv, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
    )
    line = server.stdout.readline()
    try:
        yield re.search(r"http://[\d.]+:\d+", line)[0]
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(120)
    assert code == 0, (tmp_path / "log").read_text()


def test_serve(flags, folder, expected, tokenizer, tmp_path):
    openai = pytest.importorskip("openai")
    path = [flags[0], f"real={flags[1]}", *flags[2:]]
    with serving(path, tmp_path) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(question, **options):
            turns = [{"role": "user", "content": question}]
            options = {"max_tokens": NEW, "temperature": 0} | options
            return client.chat.completions.create(model="real", messages=turns, **options)

        for question, answer in zip(QUESTIONS, expected, strict=True):
            assert ask(question).choices[0].message.content.strip() == answer
            pieces = [chunk.choices[0].delta.content or "" for chunk in ask(question, stream=True)]
            assert "".join(pieces).strip() == answer
        (choice,) = ask(CAPITAL, logprobs=True, top_logprobs=3).choices
        said = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert said.decode().startswith(choice.message.content)
        schema = {
            "type": "object",
            "properties": {"capital": {"type": "string", "maxLength": 12}},
            "required": ["capital"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        start = time.monotonic()
        (choice,) = ask(CAPITAL, response_format=form).choices
        print(f"answer in JSON: {time.monotonic() - start:.1f} s")
        assert json.loads(choice.message.content).keys() == {"capital"}
