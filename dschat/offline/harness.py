"""Runs tasks of lm-evaluation-harness on dschat's generator and training forward.

Answers are as from lm-evaluation-harness's own ``hf`` model on the same weights. Imported only
when such tasks run: the library takes seconds to load.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.model
import lm_eval.api.task
import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import dschat.distributed as dist
from dschat.chat.model import Model
from dschat.config import UserError
from dschat.config.errors import first_line, require
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.models.heads import LanguageModel
from dschat.models.packing import pack
from dschat.models.tokenizer import num_ids, text_ids
from dschat.offline.flags import OWN_TASKS, EvalConfig
from dschat.offline.rows import Metrics, Progress

_TOKENS = 8192  # of one forward


class Harness:
    """The tasks of ``config``, loaded with their rows.

    Raises:
        UserError: a task that is unknown, cannot be read, or needs what dschat lacks.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        datasets.disable_progress_bars()
        lm_eval.api.task.tqdm = lm_eval.api.model.tqdm = lambda rows, **_: rows  # no bars
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # of an earlier evaluation
        named = [(name, Path(name).expanduser().resolve()) for name in config.harness_tasks]
        folders = [path for _, path in named if path.is_dir()]
        has_names = not all(path.exists() for _, path in named)
        manager = TaskManager(include_path=folders, include_defaults=has_names)
        indexed = {entry.yaml_path: key for key, entry in manager.task_index.items()}
        self._tasks: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
        for name, path in named:
            files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
            require(bool(files), f"--task {name}: no YAML file in this folder; name another")
            specs = [indexed.get(file, str(file)) for file in files]
            for spec in specs if path.exists() else [name]:
                self._load(manager, spec)
        logging.getLogger("lm_eval.api.task").setLevel(logging.WARNING)  # labels out of range

    def metrics(self, model: Model, label: str) -> Metrics:
        """The metrics of all tasks, named TASK/METRIC, or TASK/METRIC/FILTER."""
        for task in self._tasks["tasks"].values():
            task.set_fewshot_seed(self._config.seed)
        kinds = {task.OUTPUT_TYPE for task in self._tasks["tasks"].values()}
        if not self._config.apply_chat_template and kinds != {"loglikelihood_rolling"}:
            model.warn_without_template(f"{label} is asked", "--apply_chat_template")
        found = evaluate(
            EngineModel(model, self._config, label),
            self._tasks,
            limit=self._config.max_rows,
            bootstrap_iters=0,
            apply_chat_template=self._config.apply_chat_template,
            fewshot_as_multiturn=True,
        )
        metrics: Metrics = {}
        for name, values in found["results"].items():
            task = self._tasks["tasks"].get(name)  # else a group
            for key, value in values.items():
                metric, comma, kind = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                title = f"{name}/{metric}" + f"/{kind}" * (kind != "none")
                metrics[title] = float(value)
                if task is not None and task.aggregation().get(metric) is mean:
                    rows = [
                        r.get(metric, np.nan) for r in found["samples"][name] if r["filter"] == kind
                    ]
                    metrics[title] = np.array(rows, dtype=np.float64)
        return metrics

    def _load(self, manager: TaskManager, name: str) -> None:
        try:
            loaded = manager.load([name])
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(self._config.seed)
                task.build_all_requests(limit=self._config.max_rows)  # names a bad row now
        except Exception as error:  # of YAML, Jinja, datasets, functions that the file names
            raise UserError(
                f"--task {name}: lm-evaluation-harness cannot load it ({first_line(error)}); name "
                f"a correct YAML file, one of its tasks, or {', '.join(OWN_TASKS)}"
            ) from error
        for key, task in loaded["tasks"].items():
            same = self._tasks["tasks"].get(key, task)  # a group has its tasks once more
            twice = f"--task {name}: there is a task {key} already; give each a name of its own"
            require(same.dump_config() == task.dump_config(), twice)
            unsafe = getattr(task, "UNSAFE_CODE", False), getattr(task, "MULTIMODAL", False)
            require(not any(unsafe), f"--task {name} runs code that models write, or shows images")
            if task.OUTPUT_TYPE == "generate_until":
                _sampling(task.config.generation_kwargs, self._config)
            self._tasks["tasks"][key] = task
        self._tasks["groups"] |= loaded.get("groups", {})


class EngineModel(TemplateLM):
    """A model as lm-evaluation-harness asks one. Its weights load with each kind of request."""

    def __init__(self, model: Model, config: EvalConfig, label: str) -> None:
        super().__init__()
        self._model, self._config, self._label = model, config, label
        self.tokenizer = model.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context begins with."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._model.checkpoint.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat as text; where the template refuses a system message, without it."""
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(chat_history)
        except TemplateError:
            return render([turn for turn in chat_history if turn["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return text_ids(self.tokenizer, [string], add_special_tokens is not False)[0]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-prob of each text, in windows of the model's positions."""
        rows = []
        for request in requests:
            ids, size = self.tok_encode(request.args[0]), self._model.positions
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, size, 1)
            rows.append([("", *make_disjoint_window(pair)) for pair in pairs])
        scores = iter(self._loglikelihood_tokens([window for row in rows for window in row]))
        return [sum(next(scores)[0] for _ in row) for row in rows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probs of continuations, and whether greedy decoding would give them. Contexts that
        are too long lose their start.
        """
        rows, positions = [], self._model.positions
        for text, context, continuation in requests:
            require(
                0 < len(continuation) <= positions,
                f"--task: {text!r:.60} has an answer of {len(continuation)} tokens, and "
                f"{self._model.path} takes 1 to {positions}; leave the row out",
            )
            ids = (context + continuation)[-positions - 1 :]
            rows.append((ids, len(ids) - len(continuation)))
        return logprobs(self._model, rows)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers, cut before the first of the stop strings."""
        prompts, samplings, ends = [], [], []
        for request in requests:
            context, wanted = request.args
            sampling, until = _sampling(wanted, self._config)
            room = self._model.positions - sampling.max_new_tokens
            require(
                room > 0,
                f"--task: max_gen_toks {sampling.max_new_tokens}: {self._model.path} has "
                f"{self._model.positions} positions, for prompt and answer together; lower it",
            )
            prompts.append(self.tok_encode(context)[-room:] or [self.prefix_token_id])
            samplings.append(replace(sampling, stop_token_ids=self._ends(tuple(until))))
            ends.append(until)
        longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, samplings, strict=True))
        generator, rollouts = self._model.generator(self._config.max_num_seqs, longest), []
        progress = Progress(len(prompts), 0, self._label)
        for sampling, equal in groupby(range(len(prompts)), samplings.__getitem__):
            part = list(equal)
            asked = [prompts[i] for i in part]
            rollouts.append(
                generator.generate(
                    asked, sampling, part, answered=lambda _, r: progress.advance(1, r.num_tokens)
                )
            )
        progress.close()
        ids = Rollout.joined(rollouts).token_ids
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            postprocess_generated_text(text, until, None)
            for text, until in zip(texts, ends, strict=True)
        ]

    @cache  # noqa: B019  as long as the model
    def _ends(self, until: tuple[str, ...]) -> tuple[int, ...]:
        """Ids whose text has a stop string: an answer needs no tokens after them."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return tuple(i for i, text in enumerate(texts) if any(s and s in text for s in until))


def _sampling(wanted: dict[str, Any], config: EvalConfig) -> tuple[SamplingParams, list[str]]:
    """A task's generation_kwargs: sampling, and stop strings.

    Raises:
        UserError: an argument that dschat's generator does not have, or a wrong value.
    """
    given: dict[str, Any] = {**normalize_gen_kwargs(wanted, config.max_new_tokens)}
    until, length = given.pop("until"), given.pop("max_gen_toks")
    given.pop("do_sample")
    given.setdefault("temperature", 0.0)
    try:
        return SamplingParams(max_new_tokens=length, seed=config.seed, **given), until
    except (TypeError, UserError) as error:
        message = str(error).removeprefix("SamplingParams.__init__() got an ")
        raise UserError(f"--task: generation_kwargs: {message}; correct the YAML file") from None


@torch.no_grad()
def logprobs(model: Model, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """Load ``model``'s weights. For each row, its ids and how many of them are context: the sum of
    the log-probs of the others, in nats, and whether each of them is the likeliest id.

    Adjacent rows with the same context share it.

    Raises:
        UserError: weights that are missing, damaged or not finite.
    """
    vocabulary = num_ids(model.tokenizer)
    weights = model.checkpoint.language_model(model.dtype, dropout=0.0, num_tokens=vocabulary)
    module = LanguageModel(weights.to(dist.device()).eval())
    module.check(dist.device())
    results: list[tuple[float, bool]] = []
    longest = max((len(ids) for ids, _ in rows), default=1)
    size = max(1, _TOKENS // longest)
    for part in (rows[i : i + size] for i in range(0, len(rows), size)):
        # The last id is predicted only: a row may have one more than the model has positions.
        packed = pack(
            [ids[:-1] for ids, _ in part],
            [range(start - 1, len(ids) - 1) for ids, start in part],
            [start - 1 for _, start in part],
        )
        packed.targets = torch.tensor([i for ids, start in part for i in ids[start:]])
        packed = packed.to(dist.device())
        found, _, ids = module(packed, top_k=1, num_ids=vocabulary)
        is_likeliest = (ids[:, 0] == ids[:, 1]).double()
        counts = [len(ids) - start for ids, start in part]
        sums = (row.sum().item() for row in found[:, 0].double().split(counts))
        hits = (bool(row.all()) for row in is_likeliest.split(counts))
        results += zip(sums, hits, strict=True)
    return results
