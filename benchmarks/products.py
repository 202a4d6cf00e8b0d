"""Measures the matrix products of decode steps on this CPU, by library and number of rows.

    python benchmarks/products.py
    OMP_NUM_THREADS=1 python benchmarks/products.py --rows 1 8 --shapes 4096x1024

Weights are fp32, and more of them than the caches hold, as in a model; the sides take turns. One
JSON line per shape and number of rows goes to stdout: for each side the seconds of one product
(best of the rounds), GB/s of the weight, and GFLOP/s.
"""

import argparse
import json
import time

import torch
from report import environment, rounded

from dschat.inference.model.linear import Linear, backends_for

CPU, FP32 = torch.device("cpu"), torch.float32
BYTES = 48 << 20  # of the weights that a side multiplies by


def sides_of(shape: tuple[int, int]) -> dict[str, list[Linear]]:
    count = min(200, max(1, BYTES // (4 * shape[0] * shape[1])))
    sides: dict[str, list[Linear]] = {}
    for name in backends_for(FP32):
        sides[name] = [Linear(shape, False, FP32, CPU, name) for _ in range(count)]
        for linear in sides[name]:
            linear.open().normal_()
            linear.seal()
    return sides


@torch.inference_mode()
def measure(rows: int, shape: tuple[int, int], rounds: int) -> dict:
    x, sides = torch.randn(rows, shape[1]), sides_of(shape)
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds + 1):
        for name, linears in sides.items():
            started = time.perf_counter()
            for linear in linears:
                linear(x)
            best[name] = min(best[name], (time.perf_counter() - started) / len(linears))
    size = shape[0] * shape[1]
    return {
        "rows": rows,
        "outputs": shape[0],
        "inputs": shape[1],
        "seconds": {name: rounded(s) for name, s in best.items()},
        "gb_per_s": {name: rounded(4 * size / s / 1e9) for name, s in best.items()},
        "gflop_per_s": {name: rounded(2 * rows * size / s / 1e9) for name, s in best.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 200])
    parser.add_argument(
        "--shapes", nargs="+", default=["512x512", "2752x512", "512x1376"], help="outputs x inputs"
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(json.dumps(environment(CPU)), flush=True)
    for rows in args.rows:
        for text in args.shapes:
            outs, size = map(int, text.split("x"))
            line = measure(rows, (outs, size), args.rounds)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
