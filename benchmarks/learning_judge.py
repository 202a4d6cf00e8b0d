"""Measures the accuracy of weights on held-out prompts, with one engine and seed for all sides."""

import statistics
from pathlib import Path
from typing import Any

from learning_task import exact_match
from safetensors.torch import load_file

from dschat.config import RLHFConfig
from dschat.data.batches import prompts_of
from dschat.inference import InferenceEngine, SamplingParams
from dschat.runtime.gold_eval import EVAL_SEED


class Judge:
    """Answers every held-out prompt ``num_samples`` times, sampled as in training.

    ``model``: the folder that all sides start from; ``held_out``: a table of `prompt_dataset` with
    a column ``reference``.
    """

    def __init__(
        self, model: str, config: RLHFConfig, tokenizer: Any, held_out: Any, num_samples: int
    ) -> None:
        prompts = prompts_of([held_out[i] for i in range(len(held_out))])
        self._ids, self._tokenizer = list(prompts), tokenizer
        self._references = [
            str(r) for r in prompts.columns["reference"] for _ in range(num_samples)
        ]
        self._engine = InferenceEngine.from_pretrained(
            model,
            max_num_seqs=256,
            max_seq_len=config.max_prompt_seq_len + config.max_answer_seq_len,
        )
        self._sampling = SamplingParams(
            max_new_tokens=config.max_answer_seq_len,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=EVAL_SEED,
            n=num_samples,
        )

    def accuracy(self, snapshot: Path | None = None) -> float:
        """Share of right answers with the weights in ``snapshot``; None: with those loaded now."""
        if snapshot is not None:
            self._engine.weights.load(load_file(snapshot).items())
        rollout = self._engine.generate(self._ids, self._sampling)
        answers = self._tokenizer.batch_decode(rollout.token_ids, skip_special_tokens=True)
        return statistics.mean(exact_match(answers, self._references))
