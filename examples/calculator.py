"""Products too large to work out by heart: rows for SFT, and the tool that works them out.

    python examples/calculator.py                 # the rows, into output/data/calculator
    python train.py --recipe tools

A prompt multiplies two numbers of four digits, ``4827*3916=``; the reference is the result. A
demonstration, which SFT imitates, calls the tool in half of the cases and answers with its result;
the others guess. So SFT learns both, and a reward for the right result then teaches the model to
use the tool, and to copy numbers without mistakes.
"""

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

NUM_ROWS = {"train": 12_000, "eval": 500}

_CALLS = 0.5  # share of the demonstrations that call the tool
_LONGEST = 100  # characters of an expression


def calculator(expression: str) -> str:
    """Works out an expression of whole numbers with +, - and *.

    Args:
        expression: For example 12*34+5.

    Returns:
        The result.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    parts = re.fullmatch(r"\s*(\d+)\s*((?:[-+*]\s*\d+\s*)*)", expression)
    if not parts:
        raise ValueError(f"{expression!r} is no expression of whole numbers with +, - and *")
    terms = [int(parts[1])]
    for sign, digits in re.findall(r"([-+*])\s*(\d+)", parts[2]):
        if sign == "*":
            terms[-1] *= int(digits)
        else:
            terms.append(int(sign + digits))
    return str(sum(terms))


def calculator_rows(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits: 12,000 in ``"train"``, 500 in ``"eval"``.

    Every row is ``{prompt, reference, tools, demonstration}``, with a list of the tool's JSON
    schema and a list of chat messages. The same seed gives the same rows on every machine; prompts
    are unique over both splits.
    """
    from transformers.utils import get_json_schema  # takes seconds: the tool does not need it

    tools, rng = [get_json_schema(calculator)], random.Random(seed)
    prompts: dict[str, int] = {}
    while len(prompts) < sum(NUM_ROWS.values()):
        first, second = rng.randint(1000, 9999), rng.randint(1000, 9999)
        prompts[f"{first}*{second}"] = first * second
    rows = iter([{**_row(rng, *item), "tools": tools} for item in prompts.items()])
    return {split: list(itertools.islice(rows, number)) for split, number in NUM_ROWS.items()}


def _row(rng: random.Random, expression: str, result: int) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": "assistant", "content": str(_guess(rng, result))}]
    if rng.random() < _CALLS:
        function = {"name": "calculator", "arguments": {"expression": expression}}
        calls = [{"type": "function", "function": function}]
        turns = [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "name": "calculator", "content": str(result)},
            {"role": "assistant", "content": str(result)},
        ]
    return {"prompt": f"{expression}=", "reference": str(result), "demonstration": turns}


def _guess(rng: random.Random, result: int) -> int:
    """A number as long as ``result``, and another one."""
    low = 10 ** (len(str(result)) - 1)
    guess = rng.randrange(low, 10 * low)
    return guess if guess != result else guess - 1


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "output/data/calculator")
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in calculator_rows().items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
