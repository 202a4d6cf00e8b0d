"""How a policy answers the held-out prompts of builtin/chat, judged by the gold scorer alone.

A generator and a tokenizer come in; ``eval/gold`` and its companions go out. It must not know
rewards or how the policy was trained: steps 1 and 3 and the benchmarks all measure with it.
"""

from typing import Any

import dschat.distributed as dist
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.gold_scorer import answer_metrics
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.splits import parse_spec
from dschat.inference.protocol import Generator, SamplingParams

# The same draws at every evaluation, so that differences between them are the policy's.
EVAL_SEED = 20_260_101


def gold_knows(paths: list[str]) -> bool:
    """Whether the gold scorer knows the prompts of all these ``--data_path`` entries."""
    return all(parse_spec(path)[0] == "builtin/chat" for path in paths)


def sample_gold(
    generator: Generator, tokenizer: Any, max_prompts: int, max_new_tokens: int = 48
) -> dict[str, float]:
    """Collective. Means over the first ``max_prompts`` held-out prompts, one answer each at
    temperature 1.
    """
    prompts = [row["prompt"] for row in builtin_rows()["eval"][:max_prompts]]
    mine = dist.my_share(list(range(len(prompts))))
    texts = [prompts[i] for i in mine]
    ids = [prompt_text_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=EVAL_SEED)
    rollout = generator.generate(ids, sampling, mine)
    sums = {"gold": 0.0, "answer_length": 0.0, "eos_share": 0.0}
    if mine:
        answers = tokenizer.batch_decode(rollout.token_ids, skip_special_tokens=True)
        lengths = [len(answer) for answer in rollout.token_ids]
        stopped = [reason == "stop" for reason in rollout.finish_reasons]
        means = answer_metrics(texts, answers, lengths, stopped, gold=True)
        sums = {name: means[name] * len(mine) for name in sums}
    *totals, count = dist.sum_floats([*sums.values(), float(len(mine))])
    return {
        f"eval/{name}": value / max(count, 1.0) for name, value in zip(sums, totals, strict=True)
    }
