"""One of several processes that run training cases: ``worker.py MODELS OUT CASES.json``.

RANK, WORLD_SIZE, ... are in the environment. Writes OUT/results_RANK.json: for every case its
result, in order.
"""

import gc
import json
import logging
import sys
from pathlib import Path


def main(models: str, out: str, cases_file: str) -> None:
    from step_cases import Case, run

    import dschat.distributed as dist

    logging.getLogger("dschat").setLevel(logging.ERROR)
    dist.init(timeout_minutes=3)
    cases = [Case.from_json(text) for text in json.loads(Path(cases_file).read_text())]
    results = []
    for case in cases:
        results.append(run(case, Path(models), Path(out) / case.name))
        gc.collect()
        gc.freeze()  # DeepSpeed collects garbage for every ZeRO-3 engine: what is left is none
    (Path(out) / f"results_{dist.rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.shutdown()
    dist.exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
