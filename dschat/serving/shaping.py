"""Changes the logits that tokens are drawn from, as a request asks: biases, penalties, tokens that
are forbidden, and JSON.
"""

import json
from collections import defaultdict
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.inference.sequence import Sequence
from dschat.serving.schema import GenerationRequest

# Room for indentation; a weak model would otherwise write nothing but white space.
_LAYOUT: Any = {"whitespace_pattern": r"\n? {0,8}"}
_TEXT, _OBJECT, _SCHEMA = "text", "json_object", "json_schema"


def shape_of(
    body: GenerationRequest, tokenizer: PreTrainedTokenizerBase, num_tokens: int
) -> "Shape | None":
    """What ``body`` asks for; None: nothing. ``num_tokens``: those that can be drawn.

    Raises:
        UserError: an id outside the vocabulary, a format that is not known, or no JSON schema.
    """
    schema = _schema(body.response_format)
    asks = body.logit_bias, body.allowed_token_ids, body.bad_words, body.presence_penalty
    if not any((*asks, body.frequency_penalty, schema, body.repetition_penalty not in (None, 1))):
        return None
    named = [*body.logit_bias, *(body.allowed_token_ids or ())]
    if odd := [i for i in named if not 0 <= i < num_tokens]:
        raise UserError(f"token id {odd[0]} is outside the vocabulary of {num_tokens}")
    grammar = None if schema is None else _Grammar(tokenizer, schema)
    return Shape(body, _ids_of_words(tokenizer, body.bad_words), grammar)


class Shape:
    """`Request.shape` of a request, in the order of vLLM: allowed tokens, bad words, biases, then
    penalties. Presence and frequency count the answer's tokens, repetition the prompt's too.
    """

    def __init__(
        self, body: GenerationRequest, bad_words: list[list[int]], grammar: "_Grammar | None"
    ) -> None:
        self._bias, self._allowed = body.logit_bias, body.allowed_token_ids
        self._presence = body.presence_penalty or 0.0
        self._frequency = body.frequency_penalty or 0.0
        self._repetition = body.repetition_penalty or 1.0
        self._bad_words, self._grammar = bad_words, grammar

    def __call__(self, sequence: Sequence, logits: Tensor) -> Tensor:
        answer = sequence.answer[len(sequence.request.forced) :]
        prompt = sequence.request.ids + sequence.request.forced
        logits = logits.float().clone()
        if self._allowed:
            kept = logits[self._allowed]
            logits = torch.full_like(logits, -torch.inf)
            logits[self._allowed] = kept
        for *head, last in self._bad_words:
            if answer[len(answer) - len(head) :] == head:
                logits[last] = -torch.inf
        if self._bias:
            logits[list(self._bias)] += torch.tensor(list(self._bias.values())).to(logits)
        if self._repetition != 1:
            seen = torch.tensor(list({*prompt, *answer}), device=logits.device)
            values = logits[seen]
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
            logits[seen] = values
        if answer and (self._frequency or self._presence):
            drawn = torch.tensor(answer, device=logits.device)
            ids, counts = drawn.unique(return_counts=True)
            logits[ids] -= self._frequency * counts + self._presence
        if self._grammar is not None:
            self._grammar.forbid(logits, sequence, answer)
        return logits


class _Grammar:
    """JSON of a schema, by llguidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: dict[str, Any]) -> None:
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "response_format needs llguidance; install it on the server: pip install llguidance"
            ) from None
        self._vocabulary = _vocabulary(tokenizer)
        self._grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        if problem := llguidance.LLMatcher.validate_grammar(self._grammar, self._vocabulary):
            raise UserError(f"response_format: {problem.splitlines()[0]}")
        new = partial(llguidance.LLMatcher, self._vocabulary, self._grammar)
        self._matchers = defaultdict[int, Any](new)  # by sample
        self._known = defaultdict[int, int](int)  # tokens of its answer that a matcher has read

    def forbid(self, logits: Tensor, sequence: Sequence, answer: list[int]) -> None:
        """Set the logits (V,) of tokens that may not follow ``answer`` to minus infinity."""
        matcher = self._matchers[sequence.sample]
        if not matcher.is_stopped():
            matcher.consume_tokens(answer[self._known[sequence.sample] :])
            self._known[sequence.sample] = len(answer)
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        biases = bytearray(matcher.compute_logit_bias())  # a byte per token, 0: forbidden
        known = torch.frombuffer(biases, dtype=torch.uint8)[: len(logits)]
        allowed[: len(known)] = known > 0
        allowed[sequence.request.draws.stops] = bool(matcher.is_accepting())
        if allowed.any():  # else the JSON is complete, and the request ignores EOS
            logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


@cache
def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer as llguidance has it; a second of work for a large one."""
    import llguidance.hf

    try:
        return llguidance.hf.from_tokenizer(tokenizer)
    except Exception as error:  # one of no fast tokenizer, or of a kind that it does not know
        raise UserError(
            f"response_format: llguidance cannot read this model's tokenizer ({first_line(error)})"
        ) from None


def _schema(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = _TEXT if wanted is None else wanted.get("type")
    if kind == _TEXT:
        return None
    if kind == _OBJECT:
        return {"type": "object"}
    inner = (wanted or {}).get(_SCHEMA)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != _SCHEMA or not isinstance(schema, dict):
        kinds = f"{_TEXT}, {_OBJECT} and {_SCHEMA} with a schema"
        raise UserError(
            f"response_format {json.dumps(wanted)[:80]} is not known; there are {kinds}"
        )
    return schema


def _ids_of_words(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> list[list[int]]:
    """The ids of each word, at the start of a text and within one."""
    texts = [text for word in words for text in (word, f" {word}")]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts if text.strip()]
    return [ids for ids in rows if ids]
