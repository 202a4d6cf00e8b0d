"""``dschat generate``: its lines, best of n, resuming, and training on its output."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from quick import slow
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dschat.config import RewardConfig, SFTConfig, UserError, parser
from dschat.data.sources.adapters import Example
from dschat.data.sources.splits import load_examples
from dschat.inference import InferenceEngine, SamplingParams
from dschat.models.chat_template import default_template
from dschat.offline.flags import GenerateConfig
from dschat.offline.generate import generate
from dschat.offline.rows import AnswerFile, Prompts, Rows


def rows_of(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(*flags: object) -> None:
    generate(parser.parse(GenerateConfig, list(map(str, flags))))


@pytest.fixture
def flags(models, prompts, tmp_path):
    """Answers of a tiny model in chunks of three prompts, two answers each."""
    words = f"--path {models}/llama --data_path {prompts} --max_new_tokens 6 --chunk-size 3"
    return [*words.split(), "--n", "2", "--out", str(tmp_path / "out.jsonl")]


def reward_of(model: Path, texts: list[str]) -> list[float]:
    """Scores at the last token, by transformers, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModelForSequenceClassification.from_pretrained(model).eval()
    scores = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            hidden = module.model(input_ids=ids).last_hidden_state[0, -1]
            scores.append(float(module.score(hidden)))
    return scores


def test_a_prompt_that_begins_the_answer_is_continued(models, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    data, out = tmp_path / "begun.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"prompt": turns}) + "\n")
    words = f"--path {models}/llama --data_path {data} --max_new_tokens 6 --out {out}"
    run(*words.split())
    tokenizer = AutoTokenizer.from_pretrained(models / "llama")
    tokenizer.chat_template = default_template(tokenizer)
    text = tokenizer.apply_chat_template(turns, continue_final_message=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine = InferenceEngine.from_pretrained(models / "llama")
    (expected,) = engine.generate([ids], SamplingParams(max_new_tokens=6, seed=1234))
    (row,) = rows_of(out)
    assert row["answer"] == tokenizer.decode(expected.token_ids, skip_special_tokens=True).strip()


def test_lines_keep_the_data_and_its_order(flags, prompts, models, tmp_path):
    run(*flags)
    rows, given = rows_of(tmp_path / "out.jsonl"), rows_of(prompts)
    tokenizer = AutoTokenizer.from_pretrained(models / "llama")
    engine = InferenceEngine.from_pretrained(models / "llama")
    ids = [tokenizer(row["prompt"])["input_ids"] for row in given]
    expected = engine.generate(ids, SamplingParams(max_new_tokens=6, seed=1234, n=2))
    assert [{k: row[k] for k in given[0]} for row in rows] == given
    for number, row in enumerate(rows):
        answers = [expected[2 * number], expected[2 * number + 1]]
        decoded = [tokenizer.decode(a.token_ids, skip_special_tokens=True) for a in answers]
        assert row["answers"] == decoded
        assert row["finish_reasons"] == [a.finish_reason for a in answers]
        assert row["num_tokens"] == [len(a.token_ids) for a in answers]


@pytest.mark.parametrize("name", [*slow(["llama_reward"]), "llama_reward_reversed"])
def test_best_of_n_by_a_reward_model(name, flags, models, tmp_path):
    """Also of one with other token ids, which reads the text."""
    run(*flags, "--n", 4, "--best-of", "--pairs", "--reward-model", models / name)
    compared = 0
    for row in rows_of(tmp_path / "out.jsonl"):
        eos = ["<eos>" if reason == "stop" else "" for reason in row["finish_reasons"]]
        texts = [f"{row['prompt']} {a} {e}" for a, e in zip(row["answers"], eos, strict=True)]
        # The text lacks a pad token that was drawn; a reward model with the same ids reads it.
        lengths = [len(f"{a} {e}".split()) for a, e in zip(row["answers"], eos, strict=True)]
        for i, score in enumerate(reward_of(models / name, texts)):
            if lengths[i] == row["num_tokens"][i] or name.endswith("reversed"):
                assert row["scores"][i] == pytest.approx(score, abs=1e-4)
                compared += 1
        scores = row["scores"]
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        assert row["answer"] == row["chosen"] == row["answers"][best]
        assert row["score"] == row["scores"][best]
        assert row["rejected"] == row["answers"][worst]
    assert compared >= 30


def test_best_of_n_by_a_function(flags, tmp_path):
    """The function gets the columns of the data; equal scores: the first answer."""
    (tmp_path / "short.py").write_text(
        "def score(answer_ids, id):\n"
        "    return [None if i == 3 else -float(len(a)) for a, i in zip(answer_ids, id)]\n"
    )
    run(*flags, "--n", 3, "--best_of", "--pairs", "--reward_fn", tmp_path / "short.py:score")
    for row in rows_of(tmp_path / "out.jsonl"):
        lengths = row["num_tokens"]
        if row["id"] == 3:
            assert (row["answer"], row["score"], row["chosen"]) == (None, None, None)
            continue
        assert row["answer"] == row["answers"][lengths.index(min(lengths))]
        if len(set(lengths)) == 1:
            assert row["chosen"] is row["rejected"] is None


def test_functions_get_chats_as_in_training(models, write, tmp_path):
    """TRL's get messages, OpenRLHF's the whole text that the model read and wrote."""
    chat = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w4 w5"}]
    path = write("chats.jsonl", [{"prompt": chat}])
    (tmp_path / "mine.py").write_text(
        "def trl(prompts, completions, **kwargs):\n"
        "    assert [p[0]['role'] for p in prompts] == ['system'] * len(prompts)\n"
        "    return [float(c[0]['role'] == 'assistant') for c in completions]\n"
        "def openrlhf(queries, prompts, labels):\n"
        "    assert all(q.startswith(p) and 'w3' in p for q, p in zip(queries, prompts))\n"
        "    return [10.0] * len(queries)\n"
    )
    out = tmp_path / "out.jsonl"
    made = ("--path", models / "llama", "--data_path", path, "--out", out, "--max_new_tokens", 6)
    run(*made, "--reward_fn", *(f"{tmp_path}/mine.py:{name}" for name in ("trl", "openrlhf")))
    (row,) = rows_of(out)
    assert row["score"] == 11.0


def test_a_killed_command_resumes(flags, models, tmp_path, monkeypatch):
    """At the end of a chunk, inside one, and inside a line; the file is as if never killed."""
    flags += ["--best_of", "--reward_model", str(models / "llama_reward")]
    run(*flags)
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in (ends[3], ends[4] - 5, ends[8] + 1):
        out.rename(partial)
        os.truncate(partial, size)
        run(*flags)
        assert out.read_bytes() == whole
    run(*flags)  # complete: no model loads
    monkeypatch.setattr("dschat.chat.model.Model.generator", None)
    run(*flags)
    with pytest.raises(UserError, match="--temperature was 1.0 and is 0.5"):
        run(*flags, "--temperature", 0.5)


def test_other_weights_and_data_are_other_settings(flags, prompts, tmp_path):
    run(*flags, "--max_rows", 1)
    Path(prompts).write_text(Path(prompts).read_text().replace('"id": 0', '"id": 7'))
    with pytest.raises(UserError, match="content of --data_path was"):
        run(*flags, "--max_rows", 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"eos_token_id": 5}'),
        ("chat_template.jinja", "{{ messages[0]['content'] }}"),
        ("config.json", None),
    ],
)
def test_what_is_beside_the_weights_is_a_setting(name, content, flags, models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(models / "llama", model)
    flags += ["--path", str(model), "--max_rows", "1"]
    run(*flags)
    file = model / name
    file.write_text(content or file.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    with pytest.raises(UserError, match="content of --path was"):
        run(*flags)


def test_half_an_emoji_in_a_column_comes_back(flags, prompts, tmp_path):
    row = json.loads(Path(prompts).read_text().splitlines()[0]) | {"note": "\ud83d \\ud83d é"}
    Path(prompts).write_text(json.dumps(row) + "\n")
    run(*flags)
    assert rows_of(tmp_path / "out.jsonl")[0]["note"] == row["note"]


@pytest.mark.parametrize(
    ("prompt", "problem", "hint"),
    [
        ("", "no usable prompt", "; see --columns prompt=COLUMN"),
        (
            [{"role": "user", "content": "w2"}],
            "a chat that the tokenizer's template refuses (alternate roles)",
            "",
        ),
    ],
)
def test_no_usable_row_is_an_error(prompt, problem, hint, flags, models, prompts):
    Path(prompts).write_text(f"{json.dumps({'prompt': prompt})}\n" * 3)
    tokenizer = AutoTokenizer.from_pretrained(models / "llama")
    tokenizer.chat_template = "{{ raise_exception('alternate roles') }}"
    with pytest.raises(UserError) as error:
        Prompts(Rows(parser.parse(GenerateConfig, flags)), tokenizer, 9)
    assert str(error.value) == f"--data_path: no usable rows (3 with {problem}){hint}"


def test_unusable_rows_are_dropped(models, write, tmp_path, caplog):
    rows = [{"prompt": "w2"}, {"prompt": ""}, {"prompt": " ".join(["w5"] * 60)}, {"prompt": "w3"}]
    caplog.set_level("WARNING", "dschat")
    data, out = write("mixed.jsonl", rows), tmp_path / "out.jsonl"
    run("--path", models / "opt", "--data_path", data, "--out", out, "--max_new_tokens", 8)
    assert [row["prompt"] for row in rows_of(out)] == ["w2", "w3"]
    assert "dropped 2 of 4 rows: 1 with no usable prompt, 1 with a prompt of more than 56" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("template", "given", "says"),
    [
        (True, (), True),
        (True, ("--text_as", "raw"), False),
        (True, ("--text_as", "chat"), False),
        (False, (), False),
        (False, ("--chat_template", "chat.jinja"), True),
    ],
)
def test_a_chat_model_that_is_asked_without_its_template(
    template, given, says, models, write, tmp_path, caplog, monkeypatch
):
    """A base model is not, until a flag gives it a template."""
    shutil.copytree(models / "llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }} w9 {% endfor %}")
    if template:
        shutil.copy("chat.jinja", "model/chat_template.jinja")
    chat = [{"role": "user", "content": "w3"}]
    write("asked.jsonl", [{"prompt": "w2"}, {"prompt": "w2\n\nAssistant:"}, {"prompt": chat}])
    words = "--path model --data_path asked.jsonl --max_new_tokens 2 --out out.jsonl"
    run(*words.split(), *given)
    line = "model is asked 1 of 3 prompts without its chat template; see --text_as"
    assert (line in caplog.messages) == says
    assert ("without its" in caplog.text) == says


def test_another_family_generates_with_its_own_module(models, prompts, tmp_path):
    import tiny_models

    path = tiny_models.ensure(tmp_path, "phi")
    words = f"--path {path} --data_path {prompts} --max_new_tokens 4 --out {tmp_path}/out.jsonl"
    run(*words.split(), "--n", 2)
    assert all(len(row["answers"]) == 2 for row in rows_of(tmp_path / "out.jsonl"))


def test_training_reads_the_output(models, write, tmp_path, own_cache):
    """Steps 1 and 2 get the prompt as the model read it, with the answers as they were chosen."""
    rows = [{"question": f"w{i} w4", "level": i} for i in range(2, 12)]  # a chat, by its column
    data, out = write("questions.jsonl", rows), tmp_path / "out.jsonl"
    run(
        *("--path", models / "llama", "--data_path", data, "--out", out, "--max_new_tokens", 6),
        *("--n", 4, "--best_of", "--pairs", "--reward_model", models / "llama_reward"),
    )
    lines = {json.dumps(row["prompt"]): row for row in rows_of(out)}
    assert set(lines) == {json.dumps([{"role": "user", "content": r["question"]}]) for r in rows}
    config = dict(data_path=[str(out)], data_split="1,1,1", eval_fraction=0)
    pairs, _ = load_examples(RewardConfig(**config), "reward")
    for example in map(Example.from_row, pairs):
        line = lines[json.dumps(example.prompt)]
        assert example.chosen == [{"role": "assistant", "content": line["chosen"]}]
        assert example.rejected == [{"role": "assistant", "content": line["rejected"]}]
    sft, _ = load_examples(SFTConfig(**config, columns=["chosen=answer"]), "sft")
    for example in map(Example.from_row, sft):
        line = lines[json.dumps(example.prompt)]
        assert example.chosen == [{"role": "assistant", "content": line["answer"]}]


def test_a_column_prefix_keeps_the_data(models, write, tmp_path):
    data = write("data.jsonl", [{"question": "w2", "answer": "w3"}])
    words = f"--path {models}/llama --data_path {data} --out {tmp_path}/out.jsonl"
    run(*words.split(), "--max_new_tokens", 4, "--column_prefix", "new_")
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert (row["answer"], row["new_answer"]) == ("w3", row["new_answers"][0])


def test_ctrl_c_keeps_the_chunks(flags, tmp_path, monkeypatch):
    append, calls = AnswerFile.append, []

    def stop_later(self, lines):
        append(self, lines)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "append", stop_later)
        with pytest.raises(KeyboardInterrupt):
            run(*flags)
    assert len(rows_of(tmp_path / "out.jsonl.partial")) == 6
    run(*flags)
    assert len(rows_of(tmp_path / "out.jsonl")) == 10
