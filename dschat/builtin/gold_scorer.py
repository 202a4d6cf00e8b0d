"""Scores any answer to a question of the built-in world by rule, from 0 to 1.

The score measures what training achieved; it is never the reward. The scorer parses the question
from the prompt and solves it, independently of the rows and of any model.

An answer is split into sentences. One of them must state the right answer and nothing else. One
courteous phrase of the world may stand before it and one after it. Any other sentence makes the
answer untidy, as does a missing full stop at the end.

==========================================  ==================
right, tidy, courteous before and after      1.0
right, tidy, courteous on one side           0.9
right, tidy, no courtesy                     0.5
right, untidy (rude, rambling, cut off)      0.25
one wrong sentence, tidy, courteous          0.1 for each side
anything else                                0.0
==========================================  ==================
"""

import itertools
import re

from dschat.builtin import world


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.casefold())


# Words that a statement may have in addition to those of the question and the answer.
_STATEMENT_WORDS = {
    *_words("a an and answer are backwards capital city colour count do eat equals flag food for"),
    *_words("from get gives here i if in is it leaves makes minus of opposite order people plus"),
    *_words("result reversed so sorted sum take that the them there these they to word words you"),
}
_GREETING_WORDS = {
    *_words("a again dear good great hello hi is it lovely meet nice see so to warm welcome you"),
}
_DANGLING_WORDS = set(_words("a an and are for from if in is of so the to"))
_GREETING = re.compile(r"\b(hello|hi|welcome|meet you|see you)\b")
_REFUSAL = re.compile(
    r"(but )?i (can ?not|can't|could not|will not|won't|must not|may not|am unable to|refuse to) "
    r"(help|assist|do|explain|tell|support|answer)( you)?( with| do| to do)?( this| that| it)?"
)
_TIDY = re.compile(r"(\s*[^\s.!?][^.!?]*[.!?])+")  # sentences, each with one mark at its end
_LONGEST_STATEMENT = 14  # words


def gold_score(prompt: str, answer: str) -> float:
    """The score of ``answer`` by the module's table; 0 for a prompt without a known question.

    0.8 or more means right, courteous and tidy; a wrong answer stays below 0.3.
    """
    question = world.parse(prompt)
    answer = answer.strip()
    if question is None or prompt.strip().casefold() in answer.casefold():
        return 0.0
    kind, slots = question
    sentences = re.findall(r"[^.!?]+[.!?]*", answer)
    before, rest = _strip_courtesy(sentences, world.OPENINGS + world.openings(kind), first=True)
    after, rest = _strip_courtesy(rest, world.CLOSINGS + world.closings(kind), first=False)
    num_right = sum(_states_answer(kind, slots, _words(sentence)) for sentence in rest)
    tidy = len(rest) == 1 and _TIDY.fullmatch(answer) is not None
    if num_right == 1:
        return (0.5, 0.9, 1.0)[before + after] if tidy else 0.25
    return 0.1 * (before + after) if tidy else 0.0


def answer_metrics(
    prompts: list[str],
    answers: list[str],
    lengths: list[int],
    stopped: list[bool],
    gold: bool = False,
) -> dict[str, float]:
    """Means over answers: ``answer_length`` in tokens, ``eos_share`` and, if asked, ``gold``.

    ``lengths`` count tokens; ``stopped`` tells which answers ended with EOS. ``gold`` is meant for
    prompts of the built-in data only. Without answers every mean is NaN.
    """
    metrics = {"answer_length": _mean(lengths), "eos_share": _mean(stopped)}
    if gold:
        metrics["gold"] = _mean([gold_score(p, a) for p, a in zip(prompts, answers, strict=True)])
    return metrics


def _mean(values: list) -> float:
    return sum(values) / len(values) if values else float("nan")


def _strip_courtesy(
    sentences: list[str], phrases: tuple[str, ...], first: bool
) -> tuple[bool, list[str]]:
    """Whether the first (or last) sentence is one of the phrases; and the other sentences."""
    index = 0 if first else -1
    if not sentences or _words(sentences[index]) not in [_words(phrase) for phrase in phrases]:
        return False, sentences
    return True, sentences[1:] if first else sentences[:-1]


def _states_answer(kind: str, slots: dict[str, str], words: list[str]) -> bool:
    """Whether a sentence states the right answer exactly once and no other answer."""
    text = " ".join(words)
    if kind == "refusal":
        return _REFUSAL.fullmatch(text) is not None
    right = _words(world.solve(kind, slots))
    if not 0 < len(words) <= _LONGEST_STATEMENT or words[-1] in _DANGLING_WORDS:
        return False
    if (
        any(a == b for a, b in itertools.pairwise(words))
        or f" {' '.join(right)} " not in f" {text} "
    ):
        return False
    if any(words.count(word) != 1 for word in right):
        return False
    if kind == "greeting":
        return bool(_GREETING.search(text)) and set(words) - set(right) <= _GREETING_WORDS
    question_words = set(_words(" ".join(slots.values())))
    if not set(words) - set(right) - question_words <= _STATEMENT_WORDS:
        return False
    numbers = [word for word in words if word.isdigit()]
    return not right[0].isdigit() or _calculates(kind, slots, numbers, "from" in words)


def _calculates(kind: str, slots: dict[str, str], numbers: list[str], swapped: bool) -> bool:
    """Whether the result is the last number, alone or after the operands in their order."""
    operands = [slots["a"], slots["b"]] if "a" in slots else []
    orders = [[], operands, operands[::-1]] if kind == "add" or swapped else [[], operands]
    return numbers[:-1] in orders and numbers[-1] == world.solve(kind, slots)
