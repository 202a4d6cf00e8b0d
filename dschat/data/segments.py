"""Tokenizes prompts and answers as separate segments, and marks the assistant's tokens.

Why segments: at generation the model reads the prompt's tokens and then samples its own. Tokenizing
prompt + answer as one string could merge tokens across their border, so training would see prompt
ids that generation never does. So the prompt is tokenized the same way for both, and the answer
separately, without special tokens. In a dialogue each assistant turn is a segment: the text that
the chat template adds for this turn to the rendered generation prompt.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.rendering import (
    LeftOut,
    RefusedChat,
    begun_text,
    render_chat,
    rendered_answer,
    resolved,
    through_last_answer,
    with_reasoning,
)
from dschat.data.sources.adapters import Content, Example
from dschat.data.sources.turns import BEGINS, weight_of
from dschat.models.chat_template import merges_system, turn_ends
from dschat.models.continued_text import continued_ids
from dschat.models.tokenizer import stop_ids, text_ids

_PROMPT_SHARE = 1 / 4  # of max_seq_len that a prompt keeps, however long its answer
CUT_PROMPT, CUT_ANSWER = "lost the beginning of the prompt", "lost the end of the answer"
EARLIER = "are earlier answers: the chat template rewrites earlier turns, so each is a row"
MERGED = "had the system message put in front of the first user turn (see --system_message)"


@dataclass(frozen=True)
class Segment:
    """A piece of text that is tokenized separately."""

    text: str
    weight: float | None = None  # of an assistant's turn in the loss; None: of other text
    add_special: bool = False  # let the tokenizer add its BOS: the text has none
    before: str = ""  # the text that this one follows
    has_calls: bool = False  # an answer that ends with calls of tools
    is_known: bool = False  # another row of the dialogue has it: without loss


@dataclass
class Encoded:
    """An example as ids; ``problem`` says why it cannot be used ("" if it can)."""

    prompt_ids: list[int] = field(default_factory=list)  # (P,)
    # (P,) weights of the tokens of earlier assistant turns, through their end; None: other tokens
    prompt_weights: list[float | None] = field(default_factory=list)
    # each (A,), its last token is its only one of `stop_ids`
    answers: list[list[int]] = field(default_factory=list)
    answer_weights: list[float] = field(default_factory=list)
    problem: str = ""
    cut: str = ""  # what the answers lost


Tools = Sequence[dict[str, Any]] | None  # JSON schemas, which a chat template shows to the model


def prompt_text_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Content, /, **inputs: Any
) -> list[int]:
    """The ids of a prompt (text or messages) for generation, identical to those in training.

    ``inputs``: what the chat template gets beside the messages: ``tools``, and its variables.

    Raises:
        UserError: the tokenizer's chat template refuses these messages, or fails.
    """
    segments = prompt_segments(tokenizer, prompt, **inputs)
    return [token for ids in encode(tokenizer, segments) for token in ids]


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Example],
    reasoning: str = "auto",
    every_answer: bool = False,
    train_on_prompt: bool = False,
) -> list[Encoded]:
    """Tokenize prompts and answers as one batch.

    Args:
        reasoning: what becomes of the assistant's thoughts, see `DataConfig.reasoning`.
        every_answer: in front of a dialogue whose earlier turns the template rewrites as it grows,
            return one more for each earlier answer, with the prompt that the model sees there.
        train_on_prompt: these have no loss on what is in the one before them. Answers without loss
            have one too, for their prompts.

    Raises:
        UserError: the tokenizer has no EOS, or its chat template fails.
    """
    require_eos(tokenizer)
    how = resolved(tokenizer, reasoning)
    # segments, number of answers and a note; of a refused chat, the problem
    made: list[tuple[list[Segment], int, str]] = []

    for example in examples:
        prompt, inputs = with_reasoning(example.prompt, how), example.inputs
        answers = example.answers
        if BEGINS not in prompt[-1]:  # else they are not whole turns
            answers = [with_reasoning(answer, how) for answer in answers]
        try:
            whole = prompt_segments(tokenizer, prompt, **inputs)
            turns = prompt if isinstance(prompt, list) else []
            apart = bool(turns) and every_answer and len(whole) == 1  # else answers are segments
            ends = [
                i
                for i, turn in enumerate(turns if apart else ())
                if i and (weight_of(turn) or (train_on_prompt and turn["role"] == "assistant"))
            ]
            for end in (*ends, len(prompt)):
                before, is_last = prompt[:end], end == len(prompt)
                asked = whole if is_last else prompt_segments(tokenizer, before, **inputs)
                if apart and train_on_prompt:
                    text = "".join(segment.text for segment in asked)
                    known = through_last_answer(tokenizer, turns[:end], text, inputs)
                    asked = [
                        Segment(known, is_known=True),
                        Segment(text[len(known) :], before=known),
                    ]
                elif apart:  # answers in it have rows of their own
                    asked = [replace(segment, weight=None) for segment in asked]
                own = answers if is_last else [prompt[end : end + 1]]
                said = [answer_segment(tokenizer, before, answer, **inputs) for answer in own]
                segments = [*asked, *said]
                notes = [] if is_last else [EARLIER]
                if turns and turns[0]["role"] == "system":
                    notes += [MERGED] * merges_system(tokenizer)
                made.append((segments, len(said), "; ".join(notes)))
        except RefusedChat as error:
            made.append(([], 0, str(error)))
    ids = iter(encode(tokenizer, [segment for segments, *_ in made for segment in segments]))
    encoded = []
    for segments, num_answers, note in made:
        pieces = [(segment, next(ids)) for segment in segments]
        row = _assemble(tokenizer, pieces, num_answers, note) if pieces else Encoded(problem=note)
        encoded.append(row)
    return encoded


def prompt_segments(
    tokenizer: PreTrainedTokenizerBase, prompt: Content, /, **inputs: Any
) -> list[Segment]:
    """A prompt's segments: its assistant turns, and the text that the template puts around them.

    All of it is one segment where the template rewrites earlier turns as the dialogue grows.
    """
    if isinstance(prompt, str):
        return [Segment(prompt, add_special=True)]
    if BEGINS in prompt[-1]:
        whole = begun_text(tokenizer, prompt, inputs)
        before = prompt_segments(tokenizer, prompt[:-1], **inputs)
        known = "".join(segment.text for segment in before)
        if not whole.startswith(known):
            return [Segment(whole)]
        return [*before, Segment(whole[len(known) :], before=known)]
    segments: list[Segment] = []
    rendered, rewrites = "", False
    for i, turn in enumerate(prompt):
        if turn["role"] == "assistant" and i:
            try:
                answer = answer_segment(tokenizer, prompt[:i], [turn], **inputs)
            except LeftOut:
                rewrites = True
                continue
            rewrites |= not answer.before.startswith(rendered)
            segments += [Segment(answer.before[len(rendered) :], before=rendered), answer]
            rendered = answer.before + answer.text
    whole = render_chat(tokenizer, prompt, add_generation_prompt=True, **inputs)
    if rewrites or not whole.startswith(rendered):
        return [Segment(whole)]
    return [*segments, Segment(whole[len(rendered) :], before=rendered)]


def answer_segment(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Content,
    answer: Content,
    closes: bool = True,
    /,
    **inputs: Any,
) -> Segment:
    """The answer's segment: its text, or the text that the template adds to the prompt for it.

    ``closes``: where the prompt opens a thought and the answer has none, it begins with the end of
    the thought.
    """
    if isinstance(answer, str):
        return Segment(answer, 1.0, before=str(prompt))
    assert not isinstance(prompt, str), "an answer of turns follows a prompt of turns"
    turn = answer[-1]
    asked, text = rendered_answer(tokenizer, prompt, turn, closes, **inputs)
    return Segment(text, weight_of(turn), False, asked, bool(turn.get("tool_calls")))


def encode(tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment]) -> list[list[int]]:
    """Token ids of each segment."""
    out: list[list[int]] = [[] for _ in segments]
    given = [(i, s) for i, s in enumerate(segments) if s.text]
    pairs = {i: (s.before, s.text) for i, s in given if s.before}
    for i, ids in zip(pairs, continued_ids(tokenizer, list(pairs.values())), strict=True):
        out[i] = ids
    for special in (False, True):
        indices = [i for i, s in given if s.add_special == special and not s.before]
        texts = [segments[i].text for i in indices]
        for i, ids in zip(indices, text_ids(tokenizer, texts, special), strict=True):
            out[i] = ids
    return out


def require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of EOS, which ends every answer.

    Raises:
        UserError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no EOS token to end an answer with; set eos_token in its "
            "tokenizer_config.json, or choose another --tokenizer_name_or_path"
        )
    return tokenizer.eos_token_id


def _assemble(
    tokenizer: PreTrainedTokenizerBase,
    pieces: list[tuple[Segment, list[int]]],
    num_answers: int,
    note: str,
) -> Encoded:
    ends, is_chat = stop_ids(tokenizer), not pieces[0][0].add_special
    prompt_ids: list[int] = []
    weights: list[float | None] = []
    tails: list[list[int]] = []  # what follows the first end in an answer
    unended: float | None = None  # the weight of an answer that the next turn's first token ends
    for segment, ids in pieces[: len(pieces) - num_answers]:
        # text that the template adds after an answer's end (a line break) carries no loss
        is_answer = segment.weight is not None
        weight = segment.weight if is_answer else unended
        targets = through_end(ids, ends) if is_answer else [i for i in ids[:1] if i in ends]
        num_targets = len(targets) if weight is not None else 0
        unended = weight if is_answer and not {*targets[-1:]} & {*ends} else None
        tails += [ids[num_targets:]] if segment.weight else []
        prompt_ids += ids
        others = 0.0 if segment.is_known else None
        weights += [weight] * num_targets + [others] * (len(ids) - num_targets)
    if not prompt_ids:
        return Encoded(problem="a prompt without tokens")
    own = pieces[len(pieces) - num_answers :]
    texts = [[*ids, *end_of(tokenizer, is_chat, segment.has_calls)] for segment, ids in own]
    answers = [through_end(ids, ends) for ids in texts]
    if any(len(ids) < 2 for ids in answers):
        return Encoded(problem="an answer without tokens")
    tails += [ids[len(answer) :] for ids, answer in zip(texts, answers, strict=True)]
    is_cut = any(tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in tails)
    cut = "; ".join(filter(None, [note, "lost what follows an end token in an answer" * is_cut]))
    return Encoded(prompt_ids, weights, answers, [s.weight or 0.0 for s, _ in own], cut=cut)


def prompt_share(max_len: int) -> int:
    """Tokens that a prompt keeps, if it has as many."""
    return max(int(max_len * _PROMPT_SHARE), 1)


def fit(
    encoded: Encoded, num_answers: int, max_len: int, bos: int | None
) -> tuple[list[int], list[float | None], list[list[int]], str]:
    """Cut an example to ``max_len``: (prompt ids, their weights, answers, parts that were lost).

    The prompt keeps its last ``_PROMPT_SHARE`` of ``max_len``, or all of it if it is shorter:
    answers without their question teach nothing. At least one token stays, since the answer's first
    token needs one before it.
    """
    prompt, weights = encoded.prompt_ids, encoded.prompt_weights
    if encoded.problem:
        return [], [], [[]] * num_answers, ""
    share = prompt_share(max_len)
    keep = min(len(prompt), max(max_len - max(map(len, encoded.answers)), share))
    lost = [encoded.cut] if encoded.cut else []
    if keep < len(prompt):
        lost.append(CUT_PROMPT)
        # keep the BOS: the model has always seen one first
        head = 1 if prompt[0] == bos and keep > 1 else 0
        tail = len(prompt) - (keep - head)
        prompt, weights = prompt[:head] + prompt[tail:], weights[:head] + weights[tail:]
    if any(keep + len(answer) > max_len for answer in encoded.answers):
        lost.append(CUT_ANSWER)
    answers = [answer[: max_len - keep] for answer in encoded.answers]
    return prompt, weights, answers, "; ".join(lost)


def end_of(tokenizer: PreTrainedTokenizerBase, is_chat: bool, has_calls: bool = False) -> list[int]:
    """The id for the end of an answer whose text has none; empty for a tokenizer without EOS."""
    ends = turn_ends(tokenizer, str(tokenizer.chat_template)) if is_chat else ()
    ids = (*(ends[::-1] if has_calls else ends[:1]), tokenizer.eos_token_id)
    return [i for i in ids if i is not None][:1]


def through_end(ids: list[int], ends: Container[int]) -> list[int]:
    """``ids`` up to and including the first of ``ends``; all of them without one."""
    last = next((n for n, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]
