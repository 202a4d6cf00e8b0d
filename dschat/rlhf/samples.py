"""Picks sample answers of an experience, for samples.jsonl and the log.

An experience is on the CPU, so this reads nothing from the device.
"""

import math
import shutil
import sys
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.continued_text import continued_texts
from dschat.models.stream_decoder import StreamDecoder
from dschat.observability.console import printable
from dschat.rlhf.experience import Experience

NUM_ANSWERS = 3  # of different prompts
_MAX_TOKENS = 512  # of an answer, with their numbers
_MAX_SEQUENCES = 1024  # in the lists of scores and lengths
_PROMPT_CHARS, _ANSWER_CHARS = 80, 160  # in the log


def sample_row(
    e: Experience, tokenizer: PreTrainedTokenizerBase, num_samples_per_prompt: int, has_kl: bool
) -> dict[str, Any]:
    """A row of samples.jsonl about this rank's part of a rollout; None stands for "unknown".

    ``samples``: the first answer to each of `NUM_ANSWERS` prompts, with its tokens, their
    advantages and, with ``has_kl``, log policy - log reference in nats. ``scores`` and
    ``answer_lengths``: of all answers.
    """
    first: dict[int, int] = {}  # prompt -> its first row
    for i, prompt in enumerate((e.numbers // num_samples_per_prompt).tolist()):
        first.setdefault(prompt, i)
    rows = list(first.values())[:NUM_ANSWERS]
    scores = _numbers(e.scores[:_MAX_SEQUENCES], e.scored[:_MAX_SEQUENCES].tolist())
    return {
        "samples": [_sample(e, i, tokenizer, has_kl) for i in rows],
        "scores": scores,
        "answer_lengths": (e.lengths - e.prompt_lengths)[:_MAX_SEQUENCES].tolist(),
    }


def _sample(
    e: Experience, i: int, tokenizer: PreTrainedTokenizerBase, has_kl: bool
) -> dict[str, Any]:
    ids, start = e.input_ids[i, : int(e.lengths[i])].tolist(), int(e.prompt_lengths[i])
    num_tokens = min(len(ids) - start, _MAX_TOKENS)
    kl = (e.logprobs[i] - e.ref_logprobs[i])[:num_tokens]
    total = float((e.logprobs[i] - e.ref_logprobs[i])[e.answer_mask[i]].double().sum())
    return {
        "prompt": tokenizer.decode(ids[:start], skip_special_tokens=True),
        "answer": continued_texts(tokenizer, [ids[start:]])[0],
        "score": _number(float(e.scores[i])) if e.scored[i] else None,
        "answer_length": len(ids) - start,
        "finished": bool(e.finished[i]),
        "kl": _number(total) if has_kl else None,
        "tokens": token_texts(tokenizer, ids[start : start + num_tokens]),
        "token_kl": _numbers(kl) if has_kl else None,
        "advantages": _numbers(e.advantages[i, :num_tokens]),
    }


def _number(value: float) -> float | None:
    """Four significant digits; JSON has no NaN and no infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _numbers(values: Tensor, known: list[bool] | None = None) -> list[float | None]:
    """``known``: False where the value is unknown."""
    known = known or [True] * len(values)
    return [_number(v) if k else None for v, k in zip(values.tolist(), known, strict=True)]


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds, special tokens included.

    A token that ends within a character has none; the token that completes it has the character.
    """
    decoder = StreamDecoder(tokenizer, with_special=True)
    texts = [decoder.push(token) for token in ids]
    return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []


def answer_table(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One mapping of column to text or number per sample of ``row``."""
    columns = ("prompt", "answer", "score", "answer_length", "kl")
    return [{name: sample[name] for name in columns} for sample in row["samples"]]


def format_answers(table: list[dict[str, Any]]) -> str:
    """``table`` for the log: boxed on a terminal, else one plain line per answer."""
    if not sys.stderr.isatty():
        return "\n".join(
            f"  {_score(row)}  {row['prompt'][-_PROMPT_CHARS:]!r} -> "
            f"{row['answer'][:_ANSWER_CHARS]!r}"
            for row in table
        )
    shown = Table("score", "prompt", "answer", "tokens", "KL", expand=True)
    for row in table:
        kl = "-" if row["kl"] is None else f"{row['kl']:.2f}"
        prompt, answer = row["prompt"][-_PROMPT_CHARS:], row["answer"][:_ANSWER_CHARS]
        cells = (_score(row).strip(), prompt, answer, str(row["answer_length"]), kl)
        shown.add_row(*(Text(printable(cell)) for cell in cells))
    file = StringIO()
    width = shutil.get_terminal_size().columns
    Console(file=file, force_terminal=True, width=width).print(shown)
    return file.getvalue().rstrip()


def _score(row: dict[str, Any]) -> str:
    return " none" if row["score"] is None else f"{row['score']:+.2f}"
