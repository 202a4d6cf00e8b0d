"""Samples a policy's answers to the held-out prompts of builtin/chat and scores them.

The gold scorer is independent of rewards and training: all steps and the benchmarks measure by it.
"""

import logging
from contextlib import nullcontext

from torch import nn
from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.gold_scorer import answer_metrics
from dschat.config import SupervisedConfig
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.splits import parse_spec
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.inference.generators.hf_generator import module_generator
from dschat.models.continued_text import continued_texts
from dschat.models.tokenizer import num_ids
from dschat.observability.metrics_log import MetricsLog

logger = logging.getLogger("dschat")

# Every evaluation draws with this seed, so that differences between two are the policy's.
EVAL_SEED = 20_260_101
_MAX_NEW_TOKENS = 48


def gold_knows(paths: list[str]) -> bool:
    """Whether the gold scorer knows the prompts of all these ``--data_path`` entries."""
    return all(parse_spec(path)[0] == "builtin/chat" for path in paths)


def log_gold(
    config: SupervisedConfig,
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    metrics_log: MetricsLog,
    step: int,
) -> None:
    """Collective. Write ``eval/gold``, ``eval/answer_length`` and ``eval/eos_share`` of ``module``
    under ``step``, where the gold scorer knows the data of ``config``: means over the first
    ``max_eval_samples`` held-out prompts, one answer each at temperature 1.
    """
    if not gold_knows(config.data_path):
        return
    prompts = [row["prompt"] for row in builtin_rows()["eval"][: config.max_eval_samples]]
    share = dist.my_share(list(range(len(prompts))))
    texts = [prompts[i] for i in share]
    ids = [prompt_text_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    sums = {"gold": 0.0, "answer_length": 0.0, "eos_share": 0.0}
    if share:
        longest = max(map(len, ids)) + _MAX_NEW_TOKENS
        sizes = EngineConfig(stop_ids, num_ids(tokenizer), max_seq_len=longest, cuda_graphs=False)
        sampling = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, seed=EVAL_SEED)
        made = module_generator(module, sizes)
        with made.weights.in_use() if isinstance(made, InferenceEngine) else nullcontext():
            rollout = made.generate(ids, sampling, share)
        answers = continued_texts(tokenizer, rollout.token_ids)
        lengths = [len(answer) for answer in rollout.token_ids]
        stopped = [reason == "stop" for reason in rollout.finish_reasons]
        means = answer_metrics(texts, answers, lengths, stopped, gold=True)
        sums = {name: means[name] * len(share) for name in sums}
    totals = dist.sum_named(sums | {"count": float(len(share))})
    metrics = {f"eval/{name}": totals[name] / max(totals["count"], 1.0) for name in sums}
    metrics_log.write(step, metrics)
    if step > 0:
        logger.info("gold score of sampled answers: %.3f", metrics["eval/gold"])
