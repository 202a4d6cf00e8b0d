"""Tasks of lm-evaluation-harness on dschat's engine, against the harness's own ``hf`` model."""

import json
import os
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
import tiny_models
import torch
import yaml
from byte_tokenizers import CHATML, byte_tokenizer
from documentation import PAGES, blocks
from quick import slow, some

from dschat.chat.model import Model
from dschat.config import UserError, parser
from dschat.offline.evaluate import evaluate
from dschat.offline.flags import EvalConfig

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")

TASKS = {
    "choice.yaml": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: choices
        doc_to_target: label
        num_fewshot: 1
        fewshot_split: test
        """,
    "text.yaml": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{question}} {{answer}}"
        """,
    "last_word.yaml": """
        output_type: loglikelihood
        doc_to_text: "{{question}}"
        doc_to_target: " {{answer}}"
        """,
    "answer.yaml": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{answer}}"
        description: "Answer!"
        generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 8}
        filter_list:
          - name: first
            filter:
              - {function: regex, regex_pattern: "([xyz])"}
              - {function: take_first}
        metric_list:
          - {metric: exact_match, aggregation: mean, higher_is_better: true}
        """,
}
SUMS = {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"}
FRAMES = {  # family -> what its tokenizer adds to a text, and its BOS
    "llama": ("<s> $A", "<s>"),
    "gpt2": ("$A", "</s>"),
    "opt": ("</s> $A", "</s>"),
    "qwen3": ("$A", None),
    "phi": ("$A", None),  # not a family of the engine: the Hugging Face generator
}
GOAL = "How many? 👍 hello there the answer"
CONTEXTS = ["", "hello ", "<s>hello there", GOAL, GOAL * 4, "the answer" * 60]
CONTINUATIONS = [" there", "the answer", "👍", "x", GOAL, "?" * 63]
ENDS = [["\n\n"], ["e"], ["no such text", "a"], ["</s>"], []]


@pytest.fixture(autouse=True)
def cache(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    for family, (frame, bos) in FRAMES.items():
        tokenizer = byte_tokenizer("</s>", CHATML, frame, bos_token=bos, pad_token="<pad>")
        ids = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": tokenizer.bos_token_id}
        model = tiny_models.causal_lm(family, vocab_size=len(tokenizer), **ids)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


@pytest.fixture(params=some(FRAMES, ["gpt2"]))
def checkpoint(request, checkpoints):
    return checkpoints / request.param


def both(path, *flags: str):
    """The harness's model, in batches of one (it adds BOS to all of a batch or none); dschat's."""
    from lm_eval.models.huggingface import HFLM

    from dschat.offline.harness import EngineModel

    words = ["--path", str(path), "--task", "gold", "--data_path", "builtin/chat", *flags]
    model = EngineModel(Model.find(str(path), "fp32"), parser.parse(EvalConfig, words), "")
    return HFLM(str(path), dtype="float32", device="cpu", batch_size=1), model


def instances(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_loglikelihoods(checkpoint):
    """Contexts that are empty, begin with BOS, or do not fit; answers as long as the model."""
    pairs = [(context, text) for context in CONTEXTS for text in CONTINUATIONS]
    hf, ours = both(checkpoint)
    expected = hf.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", pairs))
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_greedy_continuation_is_known_as_one(checkpoint):
    hf, ours = both(checkpoint)
    context = ours.tok_encode("hello there")
    ids = hf.model.generate(torch.tensor([context]), max_new_tokens=3, do_sample=False)
    greedy = ids[0, len(context) :].tolist()
    other = [*greedy[:-1], greedy[-1] ^ 1]
    found = ours._loglikelihood_tokens([(None, context, greedy), (None, context, other)])
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_samples_differ_and_repeat(checkpoints):
    _, ours = both(checkpoints / "gpt2")
    wanted = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 16, "until": []}
    first, again = (
        ours.generate_until(instances("generate_until", [("hello", wanted)] * 3)) for _ in range(2)
    )
    assert len(set(first)) == 3
    assert again == first


def test_a_template_without_a_system_message(checkpoints):
    hf, ours = both(checkpoints / "gpt2")
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    hf.tokenizer.chat_template = ours.tokenizer.chat_template = refuses + CHATML
    chat = [{"role": role, "content": f"a {role}"} for role in ("system", "user", "assistant")]
    for turns, asks in ((chat[:2], True), (chat[1:], False), (chat, False)):
        assert ours.apply_chat_template(turns, asks) == hf.apply_chat_template(turns, asks)


def test_rolling_loglikelihoods(checkpoint):
    texts = [(text,) for text in (*CONTEXTS[1:], *CONTINUATIONS)]
    hf, ours = both(checkpoint)
    expected = hf.loglikelihood_rolling(instances("rolling", texts), disable_tqdm=True)
    assert ours.loglikelihood_rolling(instances("rolling", texts)) == pytest.approx(
        expected, abs=1e-4 * 20
    )


@pytest.mark.slow
def test_answers(checkpoint):
    """Greedy, with stop strings; long contexts lose their start. Random weights over bytes write
    halves of characters.
    """
    wanted = {"do_sample": False, "max_gen_toks": 12}
    requests = [(c, wanted | {"until": ends}) for ends in ENDS for c in CONTEXTS[1:]]
    hf, ours = both(checkpoint)
    expected = hf.generate_until(instances("generate_until", requests), disable_tqdm=True)
    found = ours.generate_until(instances("generate_until", requests))
    assert found == expected
    assert "\ufffd" in "".join(found)


@pytest.fixture
def task(tmp_path, write):
    """Writes a task over rows; returns its file."""

    def task(name: str, text: str, rows: list[dict]) -> str:
        data = write(f"{name}.jsonl", rows)
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}}
        head = yaml.safe_dump({"task": name.removesuffix(".yaml"), "test_split": "test"} | source)
        (tmp_path / name).write_text(head + textwrap.dedent(text))
        return str(tmp_path / name)

    return task


def run(path, *flags: object) -> dict[str, dict]:
    words = ["--path", path, "--task", *flags, "--dtype", "fp32"]
    return {row["metric"]: row for row in evaluated(*words).metrics}


def evaluated(*words: object):
    return evaluate(parser.parse(EvalConfig, list(map(str, words))))


ROWS = [
    {"question": f"hello {i} there?", "answer": answer, "choices": ["x", "the answer", "e"]}
    | {"label": i % 3}
    for i, answer in enumerate(["[invalid]", "hello", "r", "[invalid]", "the answer"] * 3)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chat"),
    [
        ("gpt2", True),
        ("llama", False),
        ("llama", True),
        ("gpt2", False),
    ],
)
def test_tasks_have_the_values_of_hf(family, chat, checkpoints, task):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    paths = [task(name, text, ROWS) for name, text in TASKS.items()]
    hf, _ = both(checkpoints / family)
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True} if chat else {}
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(hf, tasks=paths, task_manager=manager, bootstrap_iters=0, **options)
    flags = ("--apply_chat_template",) if chat else ()
    found = run(checkpoints / family, *paths, *flags)
    wanted = {
        f"{name}/{metric}" + f"/{kind}" * (kind != "none"): values[f"{metric},{kind}"]
        for name, values in expected["results"].items()
        for metric, _, kind in (key.partition(",") for key in values)
        if kind and not metric.endswith("_stderr")
    }
    assert len(wanted) == 8
    assert {name: row["value"] for name, row in found.items()} == pytest.approx(wanted, rel=1e-5)
    means = {name: row for name, row in found.items() if row["rows"] is not None}
    assert means.keys() == {
        name for name in wanted if "perplexity" not in name and "bits" not in name
    }
    assert all(row["rows"] == len(ROWS) for row in means.values())
    assert all(row["low"] < row["high"] for row in means.values())
    assert 0 < found["answer/exact_match/first"]["value"] < 1
    assert 0 < found["choice/acc"]["value"] < 1


# -- the examples of docs/evaluation.md


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Writes one of the page's tasks, with replacements, and its rows; returns its file."""
    monkeypatch.chdir(tmp_path)
    found = {text.split()[1]: text for text in blocks(PAGES["evaluation.md"], "yaml")}

    def example(name: str, rows: list[dict], **fields: str) -> str:
        fields = yaml.safe_load(found[name]) | fields
        (tmp_path / name).write_text(yaml.safe_dump(fields))
        (file,) = fields["dataset_kwargs"]["data_files"].values()
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return example


@pytest.fixture
def says(monkeypatch):
    """Makes the model prefer, or answer, one text."""
    from dschat.offline.harness import EngineModel

    def says(wanted: str) -> None:
        def loglikelihood(_, requests):
            return [(-float(r.args[1] != f" {wanted}"), False) for r in requests]

        monkeypatch.setattr(EngineModel, "loglikelihood", loglikelihood)
        monkeypatch.setattr(EngineModel, "generate_until", lambda _, r: [wanted] * len(r))

    return says


NUMBERS = {"question": "?", "choices": ["2", "3", "4", "5"]}
ARC = {"question": "?", "choices": {"text": ["4", "3", "2", "1"], "label": ["1", "2", "3", "4"]}}
BY_TEXT = {"doc_to_target": "{{choices.index(answer)}}"}
BY_LETTER = {"doc_to_target": "{{'ABCDE'.index(answer)}}"}
BY_LABEL = {
    "doc_to_choice": "{{choices.text}}",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
}


@pytest.mark.parametrize(
    ("row", "fields", "right"),
    [  # none guesses whether 2 is a number or a text
        (NUMBERS | {"answer": "2"}, {}, "4"),
        (ARC | {"answerKey": "3"}, BY_LABEL, "2"),
        *slow(
            [
                (NUMBERS | {"answer": 2}, {}, "4"),
                (NUMBERS | {"answer": "2"}, BY_TEXT, "2"),
                (NUMBERS | {"answer": "D"}, BY_LETTER, "5"),
                (ARC | {"answerKey": "1"}, BY_LABEL, "4"),
            ]
        ),
    ],
)
def test_the_right_choice(row, fields, right, example, says, checkpoints):
    name = example("choice.yaml", [row], **fields)
    choices = row["choices"]
    for choice in choices if isinstance(choices, list) else choices["text"]:
        says(choice)
        assert run(checkpoints / "gpt2", name)["choice/acc"]["value"] == (choice == right)


def test_exact_match(example, says, checkpoints, caplog):
    """That a chat model is asked without its template is said, and not of perplexities."""
    answers = ["The Answer!", ["no", "the answer"], "another", ["answer"]]
    name = example("answer.yaml", [{"question": "?", "answer": a} for a in answers[:1]])
    says("the answer")
    run(checkpoints / "gpt2", name, "--apply_chat_template")
    run(checkpoints / "gpt2", example("text.yaml", [{"text": "the answer"}]))
    assert "without its chat template" not in caplog.text
    assert run(checkpoints / "gpt2", name)["answer/exact_match"]["value"] == 1
    assert "gpt2 is asked without its chat template; see --apply" in caplog.text
    rows = [{"question": "?", "answer": [a] if isinstance(a, str) else a} for a in answers]
    name = example("answer.yaml", rows, doc_to_target="answer")
    assert run(checkpoints / "gpt2", name)["answer/exact_match"]["value"] == 0.5


def test_models_are_compared_on_paired_rows(example, checkpoints):
    name = example(
        "choice.yaml", [NUMBERS | {"answer": i % 4, "question": f"{i}"} for i in range(9)]
    )
    paths = [checkpoints / family for family in ("gpt2", "llama")]
    found = evaluated("--path", *paths, "--task", name, "--max_rows", 8)
    one, other = (row["value"] for row in found.metrics if row["metric"] == "choice/acc")
    (difference, _) = found.differences
    assert difference["value"] == pytest.approx(other - one)
    assert difference["rows"] == 8


# -- mistakes


def test_a_wrong_task_is_one_line(tmp_path, example, checkpoints, monkeypatch):
    """Before weights load."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("weights load")

    monkeypatch.setattr("dschat.models.checkpoint.Checkpoint.language_model", load)
    monkeypatch.setattr("dschat.chat.model.Model.generator", load)
    rows = [NUMBERS | {"answer": "2"}]

    def error(task: str, *flags: object) -> str:
        with pytest.raises(UserError) as caught:
            run(checkpoints / "gpt2", task, *flags)
        (line,) = str(caught.value).splitlines()
        return line

    cannot_load = "choice.yaml: lm-evaluation-harness cannot load it"
    name = example("choice.yaml", rows, doc_to_target="{{label}}")
    assert f"{cannot_load} ('label' is undefined)" in error(name)
    name = example("choice.yaml", [*rows, rows[0] | {"answer": "x"}], **BY_TEXT)
    assert f"{cannot_load} ('x' is not in list)" in error(name)
    beams = {"until": ["\n"], "num_beams": 4}
    name = example("answer.yaml", rows, generation_kwargs=beams)
    assert "generation_kwargs: unexpected keyword argument 'num_beams'" in error(name)
    name = example("answer.yaml", rows, generation_kwargs={"until": [], "max_gen_toks": 64})
    assert "max_gen_toks 64" in error(name)
    long = rows[0] | {"choices": ["a" * 200, "b"], "answer": "0"}
    assert "answer of 201 tokens, and" in error(example("choice.yaml", [long]))
    name = example("choice.yaml", rows)
    Path("again.yaml").write_text(Path(name).read_text().replace("{{question}}", "?"))
    assert "there is a task choice already" in error(name, "again.yaml")
    (tmp_path / "empty").mkdir()
    assert "no YAML file in this folder" in error(f"{tmp_path}/empty")


def test_a_folder_is_all_its_tasks(tmp_path, example, says, checkpoints):
    says("4")
    for name in ("choice.yaml", "answer.yaml"):
        example(name, [NUMBERS | {"answer": "2"}])
    group = {"group": "all", "task": ["choice"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(group))
    found = run(checkpoints / "gpt2", tmp_path)
    assert found.keys() == {"choice/acc", "choice/acc_norm", "answer/exact_match", "all/acc"}
    assert found["all/acc"]["value"] == found["choice/acc"]["value"] == 1


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"need pip install 'dschat\[eval\]'"):
        parser.parse(EvalConfig, ["--path", "m", "--task", "gsm8k"])
    parser.parse(EvalConfig, ["--answers", "a", "--task", "gold"])


def test_a_label_out_of_range_is_reported(example, says, checkpoints, caplog):
    says("4")
    name = example("choice.yaml", [NUMBERS | {"answer": 2}, NUMBERS | {"answer": 7}])
    assert run(checkpoints / "gpt2", name)["choice/acc"]["value"] == 0.5
    assert "Label index was not in within range" in caplog.text


def test_it_is_quiet(example, checkpoints):
    """No bars, logs or notes of the library beside the table."""
    name = example("choice.yaml", [NUMBERS | {"answer": 2}] * 3)
    words = ["--path", str(checkpoints / "gpt2"), "--task", name, "--apply_chat_template"]
    done = forked.run("-m", "dschat", "eval", *words, cwd=os.getcwd())
    assert done.code == 0, done.stderr
    assert "choice/acc" in done.stdout
    assert [line for line in done.stderr.splitlines() if "is evaluated" not in line] == []
