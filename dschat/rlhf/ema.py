"""Keeps an exponential moving average of the actor in fp32, sharded over ranks.

`ShardedEMA.shards` substitutes the average for the actor's weights in a weight stream.
"""

import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.hybrid.weight_stream import Shard, module_shards


def _local_part(shard: Shard) -> Tensor:
    """This rank's flat fp32 part: its ZeRO-3 shard, or an equal (padded) slice of a full tensor."""
    if shard.partitioned:
        return shard.tensor.float().reshape(-1)
    size = -(-shard.numel // dist.world_size())
    flat = shard.tensor.detach().reshape(-1)
    part = flat[dist.rank() * size : (dist.rank() + 1) * size].float()
    return torch.nn.functional.pad(part, (0, size - part.numel()))


class ShardedEMA:
    """``average = decay * average + (1 - decay) * weights``, 1/N of it on each of N ranks.

    Covers the parameters that are trained. `update` comes after every optimizer step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        # This rank's part of the average, by parameter name: flat, fp32.
        self.tensors = {s.name: _local_part(s).clone() for s in self._shards()}

    def _shards(self) -> list[Shard]:
        return [s for s in module_shards(self._module) if s.name in self._trained]

    @torch.no_grad()
    def update(self) -> None:
        """Update from the current weights. No communication."""
        for shard in self._shards():
            self.tensors[shard.name].lerp_(_local_part(shard), 1 - self._decay)

    def shards(self) -> dict[str, Shard]:
        """The average as shards by parameter name, for `weight_stream`'s ``replace``."""
        return {
            s.name: Shard(s.name, s.shape, self.tensors[s.name], partitioned=True)
            for s in self._shards()
        }
