"""Tokenizes examples into one table per training step.

Tables are cached, and a ``DataReport`` of each goes to the log. ``segments.py`` turns texts into
ids.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.data.preference_rows import pair_rows
from dschat.data.segments import Tools, encode_examples, fit
from dschat.data.sources.adapters import Content, Example, Purpose
from dschat.data.sources.splits import load_examples
from dschat.data.sources.tables import derived_content, iterate, made_table, read_report

logger = logging.getLogger("dschat")

Split = Literal["train", "eval", "both"]
# A Dataset; for "both" the pair of training and held-out rows
Tables = Any
# Examples and their numbers -> a row of each, with its `problem` and what was `cut`
MakeRows = Callable[[list[Example], list[int]], Iterable[dict[str, Any]]]
_IDS, _MASK, _NOTE = List(Value("int32")), List(Value("bool")), Value("string")
_WEIGHTS = List(Value("float32"))
WITHOUT_LOSS = "had answers without loss: empty, of weight 0, of the prompt, or of another row"
_BATCH = 1000  # examples that are tokenized together


def sft_dataset(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> Tables:
    """Step 1's table: ``input_ids``, ``loss_mask`` (T,): prompt + answer + EOS, T <= max_seq_len;
    ``weights``.

    ``loss_mask[t]`` is True where token t is a target: the tokens of assistant turns with their
    EOS, or all tokens with ``--train_on_prompt``, except turns of weight 0 and empty ones; never
    position 0, which nothing predicts. ``weights`` (T,) has the tokens' weights in the loss; it is
    empty where all targets have weight 1. Rows beyond max_seq_len lose the beginning of the prompt
    (a BOS stays). An answer that does not fit beside the rest of the prompt loses its end,
    including EOS.

    A dialogue whose earlier turns the template rewrites has a row for every answer.

    Returns:
        One Dataset for split "train" or "eval", the pair of them for "both".

    Raises:
        UserError: unusable data, see ``load_examples``; no rows left.
    """
    make = partial(
        _sft_rows,
        tokenizer=tokenizer,
        max_len=config.max_seq_len,
        train_on_prompt=config.train_on_prompt,
        every_answer=config.train_on != "last",
        reasoning=config.reasoning,
    )
    columns = {"input_ids": _IDS, "loss_mask": _MASK, "weights": _WEIGHTS}
    return _tables(config, "sft", split, make, columns)


def preference_dataset(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> Tables:
    """Step 2's table: ``chosen_ids``, ``rejected_ids`` (T,): prompt + answer + EOS, as in step 1;
    ``prompt_length``, the tokens before either answer; and ``prompt_key``, the prompt's hash.

    Both sides have identical prompt tokens: the prompt is cut on the left, as in step 1, to fit the
    longer side. Pairs with identical tokens are dropped, and pairs with an answer that would lose
    its end: annotators compared whole answers, and a missing EOS would give a side away.

    Of a row of ranked answers, such answers are left out, and the best and the worst of the rest
    are chosen and rejected. For a reward model the table has all of them: ``other_ids``, further
    sequences, and ``ranks`` of chosen, rejected and the others, from 0 for the best; both are empty
    for pairs.

    Returns and raises like ``sft_dataset``.
    """
    make = partial(
        pair_rows,
        tokenizer=tokenizer,
        max_len=config.max_seq_len,
        best_and_worst=config.trains_policy,
        reasoning=config.reasoning,
    )
    columns = {"chosen_ids": _IDS, "rejected_ids": _IDS, "prompt_length": Value("int32")}
    columns["prompt_key"] = Value("int64")
    if not config.trains_policy:
        columns |= {"other_ids": List(_IDS), "ranks": List(Value("int32"))}
    return _tables(config, "reward", split, make, columns)


def prompt_dataset(
    config: RLHFConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split = "train",
    tools: Tools = None,
) -> Tables:
    """Step 3's table: ``prompt_ids`` (P,), P <= max_prompt_seq_len, ``prompt``, ``prompt_text``,
    ``index``, ``columns``, ``inputs``.

    ``prompt`` is the source of the ids, text or chat messages, as JSON. ``prompt_text``, for the
    gold scorer and the log, is a text prompt or the last user turn. ``index`` numbers the examples
    before any is dropped. Prompts that are too long are dropped, not cut. ``columns`` are the row's
    others for reward functions, as JSON: `prompt_columns` names them, `prompts_of` unpacks them;
    ``inputs`` are what the chat template gets beside ``prompt``, as JSON.
    Prompts show ``tools`` in place of their rows' tools, and a text is a user's turn.

    Returns and raises like ``sft_dataset``.
    """
    limit = config.max_prompt_seq_len
    make = partial(
        _prompt_rows,
        tokenizer=tokenizer,
        max_len=limit,
        tools=tools,
        several_turns=bool(tools or config.environment or config.tools),
        reasoning=config.reasoning,
    )
    columns = {"prompt_ids": _IDS, "index": Value("int64")}
    columns |= dict.fromkeys(("prompt", "prompt_text", "columns", "inputs"), Value("string"))
    return _tables(config, "rlhf", split, make, columns)


def _tables(
    config: CommonConfig, purpose: Purpose, split: Split, make_rows: MakeRows, columns: dict
) -> Tables:
    """Load a step's examples, tokenize the requested splits, report and drop unusable rows."""
    train, held_out = load_examples(config, purpose)
    tables = []
    if split != "eval":
        tables.append(_tokenized(f"{purpose} train data", train, make_rows, columns))
    if split != "train":
        tables.append(_tokenized(f"{purpose} eval data", held_out, make_rows, columns, True))
    return tables[0] if len(tables) == 1 else tuple(tables)


def _tokenized(
    name: str,
    examples: Dataset,
    make_rows: MakeRows,
    columns: dict[str, Any],
    held_out: bool = False,
) -> Dataset:
    """A table of ``columns``, made by ``make_rows`` from examples; its report goes to the log.

    Raises:
        UserError: no rows are left, unless they are held out.
    """
    features = Features({**columns, "problem": _NOTE, "cut": _NOTE})
    numbered = enumerate(iterate(examples, tuple(examples.column_names)))
    batches = iter(lambda: list(islice(numbered, _BATCH)), [])
    rows = (
        row
        for batch in batches
        for row in make_rows([Example.from_row(row) for _, row in batch], [i for i, _ in batch])
    )
    table = made_table(features, rows, derived_content(examples, make_rows))
    report, kept = read_report(name, table, next(iter(columns)))
    if len(kept) or not len(table):
        logger.info("%s", report)
    elif held_out:
        logger.warning("no held-out rows are left of the %s: there is no evaluation", report)
    else:
        raise UserError(
            f"no rows are left of the {report}; check the data or allow longer sequences"
        )
    rows_kept = table.remove_columns(["problem", "cut"])
    return rows_kept if len(kept) == len(table) else rows_kept.select(kept)


def _sft_rows(
    examples: list[Example],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
    train_on_prompt: bool,
    every_answer: bool,
    reasoning: str,
) -> Iterator[dict[str, Any]]:
    encoded_examples = encode_examples(
        *(tokenizer, examples, reasoning),
        every_answer=every_answer or train_on_prompt,
        train_on_prompt=train_on_prompt,
    )
    for encoded in encoded_examples:
        if not every_answer:
            encoded.prompt_weights = [None if w else w for w in encoded.prompt_weights]
        prompt, given, (answer,), cut = fit(encoded, 1, max_len, tokenizer.bos_token_id)
        ids = prompt + answer
        weights = [float(train_on_prompt) if weight is None else weight for weight in given]
        weights += encoded.answer_weights * len(answer)
        if 0.0 in given:
            cut = "; ".join(filter(None, (cut, WITHOUT_LOSS)))
        weights[:1] = [0.0] * len(weights[:1])  # nothing predicts the first token
        mask = [weight > 0 for weight in weights]
        if set(weights) <= {0.0, 1.0}:
            weights = []
        problem = encoded.problem or ("" if any(mask) else "no room for an answer in --max_seq_len")
        row = {"input_ids": ids, "loss_mask": mask, "weights": weights}
        yield row | {"problem": problem, "cut": cut}


def _prompt_rows(
    examples: list[Example],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
    tools: Tools,
    several_turns: bool,
    reasoning: str,
) -> Iterator[dict[str, Any]]:
    if tools:
        examples = [replace(e, prompt=_as_chat(e.prompt), tools=list(tools)) for e in examples]
    encoded_examples = encode_examples(tokenizer, examples, reasoning)
    for index, example, encoded in zip(indices, examples, encoded_examples, strict=True):
        problem = encoded.problem
        if len(encoded.prompt_ids) > max_len:
            problem = f"longer than --max_prompt_seq_len {max_len}"
        if several_turns and example.template_kwargs:
            problem = "chat_template_kwargs, which later turns would lack; set them for the run"
        yield {
            "prompt_ids": encoded.prompt_ids,
            "prompt": json.dumps(example.prompt),
            "prompt_text": question_text(example.prompt),
            "index": index,
            "columns": json.dumps(example.columns),
            "inputs": json.dumps(example.inputs),
            "problem": problem,
            "cut": encoded.cut,
        }


def _as_chat(prompt: Content) -> Content:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def question_text(prompt: Content) -> str:
    """A text prompt, or the last user turn."""
    if isinstance(prompt, str):
        return prompt
    questions = [turn["content"] for turn in prompt if turn["role"] == "user"]
    return questions[-1] if questions else prompt[-1]["content"]
