"""One rank of one side of `iteration.py`: loads, then runs a round for every line on stdin.

    python iteration_worker.py SPEC                # SPEC: a `Spec` as JSON

Replies are JSON lines on stdout, by rank 0: one when everything is loaded, one after each round.
All other output goes to stderr.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass
class Spec:
    """What a worker is to run."""

    case: str
    side: str
    stage: int  # of ZeRO
    folder: str  # with the models
    tiny: bool = False


def make_side(spec: Spec) -> Any:
    """The side of ``spec``, loaded; its ``run(number)`` returns the seconds of a round."""
    from iteration_cases import find_case
    from iteration_deepspeed_chat import DeepSpeedChatRLHF
    from iteration_dschat import RLHFSide, SupervisedSide
    from iteration_padded_supervised import PaddedSupervised

    case = find_case(spec.case, spec.tiny)
    common = case, Path(spec.folder), spec.stage
    if spec.side.startswith("dschat"):
        flags = {"packing": "off"} if spec.side == "dschat-padded" else {}
        return (RLHFSide if case.is_rlhf else SupervisedSide)(*common, **flags)
    if case.is_rlhf:
        return DeepSpeedChatRLHF(*common)
    return PaddedSupervised(*common, to_longest=spec.side == "deepspeed-chat-longest")


def claim_stdout() -> IO[str]:
    """The real stdout, for replies; from now on everything else writes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def main() -> None:
    replies = claim_stdout()

    import torch

    import dschat.distributed as dist
    from dschat.distributed.memory import peak_memory_gib
    from dschat.observability import console
    from dschat.startup.performance import return_freed_memory

    def reply(message: dict[str, Any]) -> None:
        peaks = dist.gather_objects(peak_memory_gib(dist.device()))
        if dist.is_main_process():
            print(json.dumps(message | {"peak_gib": max(peaks)}), file=replies, flush=True)

    # The gap between the generator's log-probs and those of the given answers is no mistake here.
    console.setup("error")
    dist.init()
    side = make_side(Spec(**json.loads(sys.argv[1])))
    reply({"threads": torch.get_num_threads()})
    for line in sys.stdin:
        measured = side.run(int(line))
        return_freed_memory()  # the other sides run next
        reply(measured)
    dist.shutdown()


if __name__ == "__main__":
    main()
