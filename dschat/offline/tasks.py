"""Turns answers and log-probs into each task's values per row."""

from collections.abc import Callable, Sequence

from dschat.builtin.gold_scorer import gold_score
from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Content, Example
from dschat.offline.flags import EvalConfig
from dschat.offline.items import Item
from dschat.offline.likelihood import Continuation, Likelihood
from dschat.offline.metrics import exact_match, numeric_match, token_f1
from dschat.offline.model import Model
from dschat.offline.statistics import Values

Metrics = dict[str, Values]  # by name

_BY_REFERENCE: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "numeric": numeric_match,
    "f1": token_f1,
}


def answer_metrics(tasks: Sequence[str], items: Sequence[Item], answers: Sequence[str]) -> Metrics:
    """The metrics that compare answers with references, and the gold score."""
    metrics: Metrics = {}
    for task in tasks:
        if task in _BY_REFERENCE:
            compare = _BY_REFERENCE[task]
            values = [
                compare(text, item.references) for text, item in zip(answers, items, strict=True)
            ]
            metrics[task] = Values.of("mean" if task == "f1" else "share", values)
        elif task == "gold":
            values = [gold_score(i.row.question, a) for i, a in zip(items, answers, strict=True)]
            metrics[task] = Values.of("mean", values)
    return metrics


def wins(scores: Sequence[float | None], others: Sequence[float | None]) -> Values:
    """Rows where the score is higher than the other; equal or missing scores count a half."""
    values = []
    for one, other in zip(scores, others, strict=True):
        tie = one is None or other is None or one == other
        values.append(0.5 if tie else float(one > other))  # type: ignore[operator]
    return Values.of("mean", values)


def likelihood_metrics(config: EvalConfig, items: Sequence[Item], model: Model) -> Metrics:
    """Perplexity of the references or texts, and multiple choice."""
    lm = Likelihood(model, config.trust_remote_code)
    metrics: Metrics = {}
    for task in config.task or ():
        if task == "perplexity":
            metrics |= _perplexity(config, items, model, lm)
        elif task == "choice":
            metrics |= _choice(items, model, lm)
    return metrics


def _perplexity(config: EvalConfig, items: Sequence[Item], model: Model, lm: Likelihood) -> Metrics:
    """e to the mean negative log-prob of a token: of every reference answer with its EOS, as step 1
    evaluates; or of plain texts without their first token.
    """
    if config.text_column:
        parts = [_windows(model, item) for item in items]
    else:
        parts = [[_continuation(model, item, item.answer, with_eos=True)] for item in items]
    sums = iter(lm.score([part for row in parts for part in row]))
    losses = [-sum(next(sums) for _ in row) for row in parts]
    counts = [float(sum(len(part.ids) - part.start for part in row)) for row in parts]
    if not sum(counts):
        raise UserError("--task perplexity: no text has more than one token; name another column")
    return {"perplexity": Values.of("perplexity", losses, counts)}


def _choice(items: Sequence[Item], model: Model, lm: Likelihood) -> Metrics:
    """Whether the right choice is the likeliest one: by the sum of its tokens' log-probs, and by
    their mean. EOS does not count.
    """
    parts = [[_choice_continuation(model, item, text) for text in item.choices] for item in items]
    sums = iter(lm.score([part for row in parts for part in row]))
    by_total, by_token = [], []
    for item, row in zip(items, parts, strict=True):
        totals = [next(sums) for _ in row]
        means = [t / (len(part.ids) - part.start) for t, part in zip(totals, row, strict=True)]
        by_total.append(float(totals.index(max(totals)) == item.right))
        by_token.append(float(means.index(max(means)) == item.right))
    return {
        "choice/total": Values.of("share", by_total),
        "choice/token": Values.of("share", by_token),
    }


def _windows(model: Model, item: Item) -> list[Continuation]:
    """A plain text in windows of the model's positions; the first token of each has no log-prob."""
    ids, size = prompt_text_ids(model.tokenizer, item.row.prompt), model.positions
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [Continuation(window, 1) for window in windows if len(window) > 1]


def _choice_continuation(model: Model, item: Item, text: str) -> Continuation:
    prompt = item.row.prompt
    if isinstance(prompt, list):
        turn = [{"role": "assistant", "content": text}]
        return _continuation(model, item, turn, with_eos=False)
    is_apart = prompt[-1:].isspace() or text[:1].isspace()
    return _continuation(model, item, text if is_apart else f" {text}", with_eos=False)


def _continuation(model: Model, item: Item, answer: Content | None, with_eos: bool) -> Continuation:
    """Prompt and answer as training tokenizes them.

    Raises:
        UserError: the answer has no tokens, or the model too few positions.
    """
    (encoded,) = encode_examples(model.tokenizer, [Example(item.row.prompt, answer)], ("chosen",))
    require(not encoded.problem, f"--data_path: {item.row.where}: {encoded.problem}; leave it out")
    answer_ids = encoded.answers[0] if with_eos else encoded.answers[0][:-1]
    ids = encoded.prompt_ids + answer_ids
    require(
        len(ids) <= model.positions,
        f"--data_path: {item.row.where}: prompt and answer have {len(ids)} tokens, and "
        f"{model.path} has {model.positions} positions; leave the row out",
    )
    return Continuation(ids, len(encoded.prompt_ids))
