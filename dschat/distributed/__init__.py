"""Ranks, collectives, failure detection and stop signals.

Callers write ``import dschat.distributed as dist``. Importing it does not load torch.
"""

from dschat.distributed.collectives import (
    Group,
    all_gather_shards,
    all_reduce_sum,
    barrier,
    exchange_objects,
    gather_objects,
    gather_on_host,
    main_process_first,
    max_int,
    my_share,
    shared_bytes,
    sum_floats,
)
from dschat.distributed.env import (
    device,
    first_host,
    is_main_process,
    local_rank,
    rank,
    world_size,
)
from dschat.distributed.process_group import (
    announce_exit,
    exit_process,
    first_failure,
    init,
    is_watched,
    shutdown,
)

__all__ = [
    "Group",
    "all_reduce_sum",
    "barrier",
    "device",
    "exchange_objects",
    "exit_process",
    "first_failure",
    "first_host",
    "gather_objects",
    "gather_on_host",
    "init",
    "is_main_process",
    "is_watched",
    "all_gather_shards",
    "announce_exit",
    "local_rank",
    "main_process_first",
    "max_int",
    "my_share",
    "rank",
    "shared_bytes",
    "shutdown",
    "sum_floats",
    "world_size",
]
