"""Has each model answer all prompts, and reads the answers of ``dschat generate``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.data.sources.readers import read_lines
from dschat.inference.protocol import Rollout
from dschat.models.continued_text import continued_texts
from dschat.offline.flags import EvalConfig
from dschat.offline.items import Item
from dschat.offline.model import Model
from dschat.offline.progress import Progress

FLAG = "--answers"


@dataclass
class Answers:
    """One answer to every item: its text, and its tokens for reward models."""

    texts: list[str]
    rollout: Rollout


def generated(config: EvalConfig, model: Model, items: Sequence[Item], label: str) -> Answers:
    """The answers of ``model``. Item i has the random numbers of prompt i."""
    ids = [prompt_text_ids(model.tokenizer, item.row.prompt) for item in items]
    generator = model.generator(config, max(map(len, ids)))
    size, parts = config.prompts_per_chunk(1), []
    progress = Progress(len(items), 0, label)
    for start in range(0, len(items), size):
        indices = [*range(len(items))][start : start + size]
        parts.append(generator.generate([ids[i] for i in indices], config.sampling(1), indices))
        progress.advance(len(indices), parts[-1].num_tokens)
    progress.close()
    rollout = Rollout.joined(parts)
    texts = continued_texts(model.tokenizer, rollout.token_ids)
    return Answers([text.strip() for text in texts], rollout)


def from_file(
    path: str, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase | None
) -> Answers:
    """The column ``answer`` of a file of ``dschat generate`` with these prompts.

    ``tokenizer``: for reward sources; None: no tokens.

    Raises:
        UserError: it has no answers, or other prompts.
    """
    texts: list[str] = []
    try:
        for line in read_lines(path):
            require(line.row is not None, f"{FLAG}: {line.where}: {line.fault}")
            texts.append(_answer_of(line.row or {}, path, len(texts), items))
    except OSError as error:
        raise UserError(f"{FLAG} {path}: {error.strerror or error}; check the path") from None
    require(
        len(texts) == len(items),
        f"{FLAG} {path} has {len(texts)} answers, and the data has {len(items)} prompts; generate "
        "it from the same rows",
    )
    answers = Answers(texts, Rollout())
    if tokenizer is not None:
        answers.rollout = encoded(items, texts, tokenizer)
    return answers


def encoded(
    items: Sequence[Item], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    """``texts`` as finished answers, tokenized as in training."""
    examples = []
    for item, text in zip(items, texts, strict=True):
        prompt = item.row.prompt
        answer = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        examples.append(Example(prompt, answer))
    eos = tokenizer.eos_token_id
    done = encode_examples(tokenizer, examples, ("chosen",))
    ids = [example.answers[0] if example.answers else [eos] for example in done]
    return Rollout(ids, [[0.0] * len(row) for row in ids], ["stop"] * len(ids))


def _answer_of(row: dict, path: str, number: int, items: Sequence[Item]) -> str:
    answer = row.get("answer")
    require(
        isinstance(answer, str),
        f"{FLAG} {path}: line {number + 1} has no answer; write the file with dschat generate, "
        "with --n 1 or --best_of",
    )
    require(
        number < len(items) and row.get("prompt") == items[number].row.prompt,
        f"{FLAG} {path}: line {number + 1} answers another prompt than the data has there; "
        f"generate it from the same rows: {json.dumps(row.get('prompt'))[:60]}",
    )
    return str(answer)
