"""Measures rollouts, refreshes and training steps on one CUDA device against what the card can do.

    python benchmarks/gpu.py                                    # every case, sides A to F
    python benchmarks/gpu.py --cases opt-1.3b gpt2 --sides C F graphs=on,lag=2 --rounds 5
    python benchmarks/gpu.py --cases kernels --kernels qkv up   # two of the kernels, one by one
    python benchmarks/gpu.py --dry                              # bytes and floors, without a GPU

Models have random weights: nothing is downloaded. A side is a letter or a list of switches:

- A: eager decode steps. B: CUDA graphs, each step read before the next one starts.
  C: graphs, read one step late. D: C with Triton kernels for attention, norms, draws and the state
  of the rows. E: D with products. F: E on training's own weights.
- graphs=on|off, kernels=all|none|PART+PART.. (of DSCHAT_CUDA_KERNELS), layout=copy|zero_copy,
  decoder=table|module (transformers' own module as the engine's decoder), lag=STEPS; left out:
  graphs, no kernels, copy, table, and answers without stop tokens, which are read when complete.

The sides take turns after a warm-up round (llama-7b and refresh-7b only with --in_turns); a graph
that cannot be captured is an error. One JSON line per case, ZeRO stage and side:

- rollout_ms (a refresh included), prefill_ms, step_ms (of a decode step), refresh_ms, iteration_ms
  (rollout, forward, backward, AdamW on its answers): medians with spread, by CUDA events.
- logprob_gap: mean difference of the log-probs of the warm-up's first answers from those that the
  module in training computes, in nats. More than 0.1 is an error.
- tokens_per_s: answer tokens / rollout_ms. refresh_bytes: 0 if weights are read in place, else it
  is an error. resident_gib, peak_gib: allocated before the round, and at most.
- floor_ms: the bytes that must be read, over the measured bandwidth of a copy (see gpu_floor.py).
  share_of_floor: floor / measured.
- copy_tb_per_s, matmul_tflops: measured first. card, driver, versions, commit, command.

By turns with them run transformers' generate and vLLM (--others), where they can; a line on stderr
names those that are skipped, and why.

opt-13b-lora measures memory: GiB that are allocated after each phase, at most meanwhile, and
reserved, and its seconds. train-1b is a case of iteration.py and has its fields. kernels times the
operations of decode steps one by one, as Triton kernels, torch and inductor compute them: one line
per operation and shape, with the fields of gpu_kernels.py.

--dry prints what needs no device: bytes and floors of every rollout and of every kernel's shapes.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_kernels
import torch
from gpu_cases import CASES, OTHERS, SIDES, GpuCase, Side, parse_side
from gpu_floor import Rates, card_rates, floor_ms, rollout_bytes
from gpu_operations import OPERATIONS, operations
from report import environment, flags, note, rounded
from rollout_workloads import MODELS
from transformers.utils import logging as transformers_logging

from dschat.config.errors import first_line

DRY_RATES = {"h200": Rates(4.3e12), "h100": Rates(3.0e12)}


def main() -> None:
    args = parse()
    if not args.dry and not torch.cuda.is_available():
        print("gpu.py: torch sees no CUDA device; --dry needs none", file=sys.stderr)
        sys.exit(2)
    transformers_logging.set_verbosity_error()
    sides = {text: parse_side(text) for text in args.sides}
    device = torch.device("cpu" if args.dry else "cuda")
    about = environment(device) | ({"commit": args.commit} if args.commit else {})
    rates = None if args.dry else card_rates(torch.device("cuda", 0))
    if rates is not None:
        about["copy_tb_per_s"] = rounded(rates.copy_bytes_per_s / 1e12)
        about["matmul_tflops"] = rounded(rates.matrix_flops_per_s / 1e12)
    failed = False
    for name in args.cases:
        case = CASES[name].tiny() if args.tiny else CASES[name]
        case = replace(case, in_turns=case.in_turns or args.in_turns)
        head = {"benchmark": "gpu", "case": name, "dry": args.dry, "tiny": args.tiny}
        lines = (
            count(name, case, args.kernels)
            if rates is None
            else measure(name, case, sides, args, rates)
        )
        try:
            for line in lines:
                print(json.dumps(head | about | line), flush=True)
        except torch.OutOfMemoryError as error:
            note(f"{name}: out of memory: {first_line(error)}")
            failed = True
        except gpu_kernels.Failed as error:
            note(f"{name}: failed: {error}")
            failed = True
    sys.exit(int(failed))


def parse() -> argparse.Namespace:
    parser = flags(__doc__, rounds=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), metavar="SIDE")
    only = "only these of the case kernels"
    parser.add_argument("--kernels", nargs="+", choices=OPERATIONS, default=[], help=only)
    loaded = "keep all sides of llama-7b and refresh-7b loaded, too: 50 GiB each"
    parser.add_argument("--in_turns", action="store_true", help=loaded)
    parser.add_argument("--dry", action="store_true", help="bytes and floors, time nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows, to try it out")
    beside = "engines beside those of dschat: without a name none, left out all"
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=OTHERS, help=beside)
    parser.add_argument("--commit", help="to record outside a git checkout")
    args = parser.parse_args()
    for side in args.sides:
        try:
            parse_side(side)
        except ValueError as error:
            parser.error(f"--sides {error}")
    return args


def count(name: str, case: GpuCase, kernels: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of ``--dry``."""
    if case.kernels:
        yield from gpu_kernels.count(operations(case.kernels, kernels), DRY_RATES)
    elif case.rollout is None:
        note(f"{name}: skipped, it has no rollout to count")
    else:
        config = MODELS[case.rollout.model]()
        line: dict[str, Any] = rollout_bytes(config, case.rollout, torch.bfloat16)
        for card, rates in DRY_RATES.items():
            found = floor_ms(config, case.rollout, torch.bfloat16, rates)
            line[f"floor_ms_{card}"] = {key: rounded(value) for key, value in found.items()}
        yield line


def measure(
    name: str, case: GpuCase, sides: dict[str, Side], args: argparse.Namespace, rates: Rates
) -> Iterator[dict[str, Any]]:
    """The lines of a case on the device."""
    if case.iteration:
        import iteration

        sides_here = iteration.SIDES if args.others else iteration.SIDES[:1]
        yield from iteration.measure(case.iteration, list(sides_here), args.rounds, args.tiny)
        return
    if case.kernels:
        chosen = operations(case.kernels, args.kernels)
        yield from gpu_kernels.measure(chosen, torch.device("cuda", 0), args.rounds, rates)
        return
    # Imported here, since DeepSpeed takes seconds to import and logs meanwhile.
    import gpu_sides

    if case.lora_rank:
        yield gpu_sides.memory(case)
        return
    yield from gpu_sides.measure(name, case, sides, args.others, args.rounds, rates)


if __name__ == "__main__":
    main()
