"""Has models answer the items, and compares answers with references and with each other."""

from dschat.config.errors import require
from dschat.offline.entrants import Answers, encoded, from_file, generated
from dschat.offline.flags import NEED_REWARD, EvalConfig
from dschat.offline.items import Item
from dschat.offline.model import Model
from dschat.offline.rows import encoder
from dschat.offline.scoring import AnswerScorer
from dschat.offline.statistics import Values
from dschat.offline.tasks import Metrics, answer_metrics, wins

Scores = list[float | None]


class Judge:
    """Measures the answers of one entrant after the other; the first one is the opponent of the
    others.

    Args:
        columns: of the data.
        models: of ``--path``. Answer files are tokenized as the first one's answers.

    Raises:
        UserError: a reward source that is unusable; an answer file with other prompts, or without a
            model whose tokens a reward source could read.
    """

    def __init__(
        self, config: EvalConfig, columns: list[str], items: list[Item], models: list[Model]
    ) -> None:
        self._config, self._items, self._models = config, items, models
        self._tasks = config.task or []
        self._first: Scores | None = None
        self._scorers: dict[str, AnswerScorer] = {}  # by the model's path
        is_scored = bool({*NEED_REWARD} & {*self._tasks})
        tokenizer = models[0].tokenizer if models and is_scored else None
        self._files = {path: from_file(path, items, tokenizer) for path in config.answers or ()}
        if not is_scored:
            return
        require(
            bool(models),
            "--task score and win_rate read tokens: name a model with --path beside --answers",
        )
        self._scorers = {model.path: AnswerScorer(config, model, columns) for model in models}

    def metrics(self, entrant: Model | str, label: str) -> Metrics:
        """The metrics of a model's answers, or of those in a file."""
        model = self._models[0] if self._scorers else None
        if isinstance(entrant, Model):
            model, answers = entrant, generated(self._config, entrant, self._items, label)
        else:
            answers = self._files[entrant]
        metrics = answer_metrics(self._tasks, self._items, answers.texts)
        return metrics | (self._scored(model, answers) if self._scorers and model else {})

    def close(self) -> None:
        """Stop the threads and processes of reward functions."""
        for scorer in self._scorers.values():
            scorer.close()

    def _scored(self, model: Model, answers: Answers) -> Metrics:
        """Mean score, and the share of rows won against references and the first entrant."""
        rows = [item.row for item in self._items]
        encode = encoder(model.tokenizer, model.positions)
        for row in rows:
            encode(row)
        scorer = self._scorers[model.path]
        scorer.load()
        scores = scorer.score(rows, answers.rollout)
        metrics: Metrics = {}
        if "score" in self._tasks:
            known = [float(score is not None) for score in scores]
            require(any(known), "--task score: the reward sources score no answer; name another")
            metrics["score"] = Values.of("mean", [score or 0.0 for score in scores], known)
        if "win_rate" in self._tasks:
            if all(item.references for item in self._items):
                texts = [item.references[0] for item in self._items]
                references = encoded(self._items, texts, model.tokenizer)
                metrics["win_rate/reference"] = wins(scores, scorer.score(rows, references))
            if self._first is not None:
                metrics["win_rate/first"] = wins(scores, self._first)
        self._first = self._first or scores
        return metrics
