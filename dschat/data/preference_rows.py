"""Makes step 2's rows: the answers to a prompt that can be compared, tokenized, best first."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat.data.segments import Encoded, encode_examples, fit, prompt_share
from dschat.data.sources.adapters import Example
from dschat.data.sources.splits import key_hash


def pair_rows(
    examples: list[Example],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
    best_and_worst: bool,
    reasoning: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Rows of ``preference_dataset``; ``best_and_worst``: without the answers between them. The
    side of an unpaired answer's row that has none is its prompt alone.
    """
    encoded_examples = encode_examples(tokenizer, examples, reasoning)
    for example, encoded in zip(examples, encoded_examples, strict=True):
        sides = [example.chosen is not None, example.rejected is not None]
        kept, lost = _comparable(encoded, example.ranks or [0, 1][: sum(sides)], max_len)
        problem = encoded.problem or ("" if kept else lost)
        encoded = replace(encoded, answers=[ids for _, ids in kept], problem=problem)
        num_answers = max(2, len(kept))
        prompt, _, answers, cut = fit(encoded, num_answers, max_len, tokenizer.bos_token_id)
        if kept and not all(sides):
            answers.insert(sides.index(False), [])
        best, *others, worst = (prompt + ids for ids in answers)
        row = {
            "chosen_ids": best,
            "rejected_ids": worst,
            "prompt_length": len(prompt),
            "prompt_key": key_hash(json.dumps(example.prompt), "prompt") >> 1,
            "problem": problem,
            "cut": "; ".join(filter(None, (cut, lost and f"lost {lost}"))),
        }
        if not best_and_worst:
            ranks = [rank for rank, _ in kept] if others else []
            row |= {"other_ids": others, "ranks": [*ranks[:1], *ranks[-1:], *ranks[1:-1]]}
        yield row


def _comparable(
    encoded: Encoded, ranks: list[int], max_len: int
) -> tuple[list[tuple[int, list[int]]], str]:
    """The answers that can be compared, with their ranks, best first; and why others cannot.

    None, if they all tie. Of answers with the same tokens, the best stays. One answer alone needs
    no other.
    """
    if encoded.problem:
        return [], ""
    answers = zip(ranks, encoded.answers, strict=True)
    room = max_len - min(len(encoded.prompt_ids), prompt_share(max_len))
    kept: list[tuple[int, list[int]]] = []
    lost = ""
    for rank, ids in sorted(answers, key=lambda answer: answer[0]):
        if len(ids) > room:
            lost = f"an answer too long for --max_seq_len {max_len}"
        elif ids not in (known for _, known in kept):
            kept.append((rank, ids))
    if len({rank for rank, _ in kept}) < min(2, len(ranks)):
        return [], lost or "chosen and rejected alike"
    return kept, lost


def most_answers(*tables: Dataset) -> int:
    """The answers of the longest ranking in tables of ``preference_dataset``; at least 2."""
    counts = [2]
    for table in tables:
        if len(table):
            ranks = table.select_columns(["ranks"]).with_format("arrow")[:]["ranks"]
            counts.append(pc.max(pc.list_value_length(ranks)).as_py())
    return max(counts)
