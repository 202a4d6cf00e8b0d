"""Changes the logits that tokens are drawn from, as a request asks: biases, penalties, tokens that
are forbidden, and JSON.
"""

import json
from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.inference.requests.sequence import Sequence
from dschat.openai_api.schema import GenerationRequest

# Room for indentation; a weak model would otherwise write nothing but white space.
_LAYOUT: Any = {"whitespace_pattern": r"\n? {0,8}"}
_TEXT, _OBJECT, _SCHEMA = "text", "json_object", "json_schema"


def shape_of(
    body: GenerationRequest, tokenizer: PreTrainedTokenizerBase, num_tokens: int
) -> "Shape | None":
    """What ``body`` asks for; None: nothing. ``num_tokens``: those that can be drawn.

    Raises:
        UserError: an id outside the vocabulary, a format that is not known, or no JSON schema that
            can be followed.
    """
    schema = _schema(body.response_format)
    asks = body.logit_bias, body.allowed_token_ids, body.presence_penalty
    if not any((*asks, body.frequency_penalty, schema, body.repetition_penalty not in (None, 1))):
        return None
    biased, allowed = list(body.logit_bias), body.allowed_token_ids or []
    if odd := [i for i in (*biased, *allowed) if not 0 <= i < num_tokens]:
        raise UserError(f"token id {odd[0]} is outside the vocabulary of {num_tokens}")
    if schema is not None and body.min_tokens:
        raise UserError("min_tokens: an answer ends where its response_format does; leave it out")
    bias = torch.full((num_tokens,), -torch.inf if allowed else 0.0)
    bias[allowed] = 0.0
    bias[biased] += torch.tensor(list(body.logit_bias.values()))
    return Shape(body, bias, None if schema is None else _Grammar(tokenizer, schema))


class Shape:
    """`Request.shape` of all requests of a body, as in vLLM: allowed tokens and biases, then
    penalties. Presence and frequency count the answer's tokens, repetition the prompt's too.

    ``bias``: (V,) of every step. ``problem``: why an answer could not follow its format.
    """

    problem = ""

    def __init__(
        self,
        body: GenerationRequest,
        bias: Tensor,
        grammar: "_Grammar | None",
    ) -> None:
        self._bias, self._grammar = bias, grammar
        self._presence = body.presence_penalty or 0.0
        self._frequency = body.frequency_penalty or 0.0
        self._repetition = body.repetition_penalty or 1.0

    def __call__(self, sequence: Sequence, logits: Tensor) -> Tensor:
        answer = sequence.answer[len(sequence.request.forced) :]
        prompt = sequence.request.ids + sequence.request.forced
        logits, self._bias = logits.float().clone(), self._bias.to(logits.device)
        logits[: len(self._bias)] += self._bias
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
            self.problem = self._grammar.forbid(logits, sequence, answer) or self.problem
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
        json.dumps(schema, ensure_ascii=False).encode()  # raises for half of a character
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        except ValueError as error:  # a number of too many digits
            raise UserError(f"response_format: {first_line(error):.200}") from None
        start = llguidance.LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
        start.compute_logit_bias()  # most of what fails does so at the first token
        if start.is_error():
            raise UserError(_why(start))
        self._matchers = defaultdict[Sequence, Any](start.deep_copy)
        self._known = defaultdict[Sequence, int](int)  # tokens of it that its matcher has read

    def forbid(self, logits: Tensor, sequence: Sequence, answer: list[int]) -> str:
        """Set the logits (V,) of tokens that may not follow ``answer`` to minus infinity; returns
        the problem if there are no others.
        """
        matcher = self._matchers[sequence]
        if not matcher.is_stopped():
            matcher.consume_tokens(answer[self._known[sequence] :])
            self._known[sequence] = len(answer)
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        biases = bytearray(matcher.compute_logit_bias())  # a byte per token, 0: forbidden
        known = torch.frombuffer(biases, dtype=torch.uint8)[: len(logits)]
        allowed[: len(known)] = known > 0
        allowed[sequence.request.draws.stops] = bool(matcher.is_accepting())
        allowed = allowed.to(logits.device) & (logits > -torch.inf)
        if matcher.is_error():
            return _why(matcher)
        if allowed.any():
            logits.masked_fill_(~allowed, -torch.inf)
        elif not matcher.is_accepting():  # else the request ignores EOS
            return _why(matcher)
        return ""


def _why(matcher: Any) -> str:
    told = matcher.get_error().partition("\n")[0].rstrip(":")[:200] or "its tokens are forbidden"
    return f"response_format: no answer can follow it ({told})"


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
