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
from dschat.inference.hf_generator import module_generator
from dschat.models.continued_text import continued_texts
from dschat.models.tokenizer import num_ids
from dschat.observability.metrics_log import MetricsLog

logger = logging.getLogger("dschat")

# Every evaluation draws with this seed, so that differences between two are the policy's.
EVAL_SEED = 20_260_101


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
    """Collective. Write ``eval/gold`` of ``module``'s answers and its companions under ``step``,
    where the gold scorer knows the data of ``config``.
    """
    if gold_knows(config.data_path):
        metrics = sample_gold(module, tokenizer, stop_ids, config.max_eval_samples)
        metrics_log.write(step, metrics)
        if step > 0:
            logger.info("gold score of sampled answers: %.3f", metrics["eval/gold"])


def sample_gold(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    max_prompts: int,
    max_new_tokens: int = 48,
) -> dict[str, float]:
    """Collective. ``eval/gold``, ``eval/answer_length`` and ``eval/eos_share``: means over the
    first ``max_prompts`` held-out prompts, one answer each at temperature 1.
    """
    prompts = [row["prompt"] for row in builtin_rows()["eval"][:max_prompts]]
    share = dist.my_share(list(range(len(prompts))))
    texts = [prompts[i] for i in share]
    ids = [prompt_text_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    sums = {"gold": 0.0, "answer_length": 0.0, "eos_share": 0.0}
    if share:
        longest = max(map(len, ids)) + max_new_tokens
        sizes = EngineConfig(stop_ids, num_ids(tokenizer), max_seq_len=longest, cuda_graphs=False)
        sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=EVAL_SEED)
        made = module_generator(module, sizes)
        with made.weights.in_use() if isinstance(made, InferenceEngine) else nullcontext():
            rollout = made.generate(ids, sampling, share)
        answers = continued_texts(tokenizer, rollout.token_ids)
        lengths = [len(answer) for answer in rollout.token_ids]
        stopped = [reason == "stop" for reason in rollout.finish_reasons]
        means = answer_metrics(texts, answers, lengths, stopped, gold=True)
        sums = {name: means[name] * len(share) for name in sums}
    totals = dist.sum_named(sums | {"count": float(len(share))})
    return {f"eval/{name}": totals[name] / max(totals["count"], 1.0) for name in sums}
