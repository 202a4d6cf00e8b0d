"""Kills real runs at random moments, a hundred times and more, and reports the outcomes.

    make faults
    python tests/faults/sweep.py --kills 20 --seed 7

Every case of `cases` runs undisturbed once; then it is killed and resumed until it has been killed
often enough. Each time it finishes, its metrics and weights must equal those of the undisturbed run
bit by bit. Before that, train.py alone is killed, followed at once by the same command (`orphans`).
Exits with 1 where one differs.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what the tests share

import orphans  # noqa: E402
from cases import SWEEP  # noqa: E402
from runs import KINDS, Case, finish, make_models, survive  # noqa: E402

from dschat.observability import console  # noqa: E402

KILLS_OF_ONE = 4  # before a run may come to its end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help="in all, shared out; default: as cases.py says")
    parser.add_argument("--seed", default="0", help="draws other instants")
    parser.add_argument("--train-py", action="store_true", help="kill train.py alone, no steps")
    args = parser.parse_args()
    every = sum(SWEEP.values()) + sum(orphans.SWEEP.values())
    share = 1.0 if args.kills is None else args.kills / every
    began, kills, runs, lost = time.monotonic(), Counter(), 0, []
    console.setup("error")
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        good = sweep_train_py(models, Path(folder), share, args.seed)
        if args.train_py:
            return 0 if good else 1
        for number, (case, wanted) in enumerate(SWEEP.items()):
            scratch = Path(folder) / str(number)
            scratch.mkdir()
            try:
                found = sweep(case, models, scratch, max(1, round(share * wanted)), args.seed)
            except AssertionError as error:
                lost.append(case)
                print(f"LOST  {case.name}: {str(error)[-2000:]}", flush=True)
                continue
            kills += found[0]
            runs += found[1]
            print(f"{found[0].total():4} kills in {found[1]} runs: {case.name}", flush=True)
    print(f"\nkilled {kills.total()} times in {runs} runs of {len(SWEEP)} commands:")
    for kind in KINDS:
        print(f"{kills[kind]:6}  in {kind}")
    minutes = (time.monotonic() - began) / 60
    print(f"survived: {runs} of {runs + len(lost)} runs, to the bit; {minutes:.0f} minutes")
    return 0 if good and not lost else 1


def sweep_train_py(models: Path, folder: Path, share: float, seed: str) -> bool:
    """Kill train.py alone; whether all its runs equal the undisturbed ones."""
    kills, runs, good = 0, 0, True
    for (steps, ranks), number in orphans.SWEEP.items():
        whole = folder / f"whole{ranks}"
        seconds = orphans.run_whole(orphans.train_py(models, whole, steps, ranks))
        left = max(1, round(share * number))
        while left > 0:
            command = orphans.train_py(models, folder / f"killed{runs}", steps, ranks)
            few = min(KILLS_OF_ONE, left)
            try:
                found = orphans.survive_alone(command, whole, seconds, few, f"{seed} {runs}")
            except AssertionError as error:
                print(f"LOST  train.py, {ranks} processes: {str(error)[-2000:]}", flush=True)
                found, good = few, False
            kills, runs, left = kills + found, runs + 1, left - found
    waits = sum(log.read_text().count("waiting: ") for log in folder.glob("killed*.log"))
    print(
        f"killed train.py alone {kills} times in {runs} runs; {waits} times the same command had "
        f"to wait; {'all' if good else 'NOT ALL'} equal the undisturbed runs, bit by bit"
    )
    return good


def sweep(
    case: Case, models: Path, scratch: Path, wanted: int, seed: str
) -> tuple[Counter[str], int]:
    """The kills by kind, and the runs that they were spread over."""
    whole, log = scratch / "whole", scratch / "whole.log"
    assert finish(case.command(models, whole), log) == 0, log.read_text()
    kills, runs = Counter(), 0
    while kills.total() < wanted:
        out = scratch / f"killed{runs}"
        few = min(KILLS_OF_ONE, wanted - kills.total())
        kills += survive(case, models, out, whole, few, f"{seed} {case.name} {runs}")
        runs += 1
    return kills, runs


if __name__ == "__main__":
    sys.exit(main())
