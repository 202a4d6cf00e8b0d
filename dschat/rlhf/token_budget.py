"""Step 3's token budget where ``--max_tokens_per_micro_batch`` is auto."""

from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.config.fields import AUTO
from dschat.models.packing import PackedRows, pack
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.runtime.token_budget import measure_budget


def settle_token_budget(engine: DeepSpeedRLHFEngine, args: RLHFConfig) -> None:
    """Collective. Measure the budget if it is auto and not yet known.

    NOTE: after the first rollout, whose KV cache may stay in memory while the models train.
    """
    if args.max_tokens_per_micro_batch != AUTO or engine.token_budget:
        return
    start, length = args.max_prompt_seq_len, args.longest_row

    def longest(num_rows: int) -> PackedRows:
        """The longest rows, of different prompts."""
        packed = pack([[0] * length] * num_rows, [range(start - 1, length - 1)] * num_rows)
        return packed.to(dist.device())

    def actor_loss(num_rows: int) -> Tensor:
        with_entropy = args.entropy_coef > 0
        logprobs, entropy = engine.actor(longest(num_rows), args.temperature, with_entropy)
        return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()

    def critic_loss(num_rows: int) -> Tensor:
        assert engine.critic is not None
        return engine.critic(longest(num_rows)).sum()

    models = [(engine.actor, actor_loss)]
    if engine.critic is not None:
        models.append((engine.critic, critic_loss))
    most = args.mini_batch_size(1)
    engine.token_budget = measure_budget(models, length, most, args.align_overflow)
