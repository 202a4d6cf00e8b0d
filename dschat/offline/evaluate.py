"""``dschat eval``: evaluates models and answer files on local data.

Tasks of lm-evaluation-harness are in `harness`. Those here compare files of ``dschat generate``:
``score`` and ``win_rate`` by their scores, ``gold`` by the built-in gold scorer. For a model of
``--path`` such a file is written first.
"""

import json
import logging
import os
from dataclasses import fields
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dschat.builtin.gold_scorer import gold_score
from dschat.chat.model import Model
from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.sources.readers import read_lines
from dschat.data.tokenize import question_text
from dschat.observability import console
from dschat.offline.flags import NEED_REWARD, EvalConfig, GenerateConfig, PromptsConfig
from dschat.offline.generate import generate
from dschat.offline.results import Metrics, Results, check_out
from dschat.reporting.run_files import shortest_ends

logger = logging.getLogger("dschat")

FLAG = "--answers"
_PREFIX = "dschat_eval_"  # of the columns of a model's answers, beside those of the data
Answers = list[dict[str, Any]]  # lines with prompt, answer and score


def evaluate(config: EvalConfig) -> Results:
    """The metrics of every model and answer file of ``config``.

    Raises:
        UserError: a wrong flag, model, reward source, task or data, before weights load.
    """
    check_out(config.out)
    paths, files, tasks = config.path or [], config.answers or [], config.own_tasks
    models = [
        Model.find(path, config.dtype, config.trust_remote_code, **config.template_flags)
        for path in paths
    ]
    harness = None
    if config.harness_tasks:
        from dschat.offline.harness import Harness

        harness = Harness(config)
    labels = shortest_ends([os.path.normpath(p).split(os.sep) for p in (*paths, *files)])
    by_label: dict[str, Metrics] = {label: {} for label in labels}
    if tasks:
        given = [read_answers(path, tasks) for path in files]
        require_equal_prompts(given, files)
        answers = [*(_answers_of(path, config) for path in paths), *given]
        require_equal_prompts(answers, [*paths, *files])
        by_label = dict(zip(labels, answer_metrics(tasks, answers), strict=True))
    console.release()
    if harness is not None:
        for model, label in zip(models, labels, strict=True):
            by_label[label] |= harness.metrics(model, label)
            logger.info("%s is evaluated", label)
    return Results.of(config, by_label)


def answer_metrics(tasks: list[str], answers: list[Answers]) -> list[Metrics]:
    """The values per row of each of ``answers``; wins over the first of them."""
    metrics: list[Metrics] = []
    scores = [np.array([row.get("score") for row in rows], dtype=np.float64) for rows in answers]
    for rows, own in zip(answers, scores, strict=True):
        found: Metrics = {}
        if "gold" in tasks:
            gold = [gold_score(question_text(row["prompt"]), row["answer"]) for row in rows]
            found["gold"] = np.array(gold)
        if "score" in tasks:
            found["score"] = own
        if "win_rate" in tasks and metrics:
            won, lost = own > scores[0], own < scores[0]
            found["win_rate"] = 0.5 + 0.5 * won - 0.5 * lost  # a half where one has no score
        metrics.append(found)
    return metrics


def read_answers(path: str, tasks: list[str], prefix: str = "") -> Answers:
    """A file of ``dschat generate``, whose columns start with ``prefix``.

    Raises:
        UserError: it lacks what the tasks need.
    """
    rows: Answers = []
    try:
        for line in read_lines(path):
            require(line.row is not None, f"{FLAG}: {line.where}: {line.fault}")
            rows.append({k.removeprefix(prefix): v for k, v in (line.row or {}).items()})
            require(
                isinstance(rows[-1].get("answer"), str) and "prompt" in rows[-1],
                f"{FLAG} {path}: line {len(rows)} has no answer; write the file with dschat "
                "generate, with --n 1 or --best_of",
            )
    except OSError as error:
        raise UserError(f"{FLAG} {path}: {error.strerror or error}; check the path") from None
    scored = any(isinstance(row.get("score"), (int, float)) for row in rows)
    needing = [task for task in tasks if task in NEED_REWARD]
    require(
        scored or not needing,
        f"{FLAG} {path} has no scores for --task {' '.join(needing)}; write the file with dschat "
        "generate and a reward",
    )
    return rows


def require_equal_prompts(answers: list[Answers], names: list[str]) -> None:
    """Raise ``UserError`` unless all of ``answers`` have the same prompts."""
    for rows, name in zip(answers, names, strict=True):
        first = answers[0]
        require(
            len(rows) == len(first),
            f"{name} answers {len(rows)} prompts, and {names[0]} {len(first)}; generate both from "
            "the same rows",
        )
        for number, (row, other) in enumerate(zip(rows, first, strict=True), start=1):
            require(
                row["prompt"] == other["prompt"],
                f"{name}: line {number} answers another prompt than {names[0]} there; generate "
                f"both from the same rows: {json.dumps(row['prompt'])[:60]}",
            )


def _answers_of(path: str, config: EvalConfig) -> Answers:
    """One answer of the model at ``path`` to every prompt of the data."""
    shared = {field.name: getattr(config, field.name) for field in fields(PromptsConfig)}
    with TemporaryDirectory() as folder:
        out = os.path.join(folder, "answers.jsonl")
        generate(GenerateConfig(**shared, path=path, out=out, column_prefix=_PREFIX))
        return read_answers(out, config.own_tasks, _PREFIX)
