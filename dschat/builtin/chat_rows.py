"""Generates ``builtin/chat``: 5,300 short preference rows about an invented world, from one seed.

Chosen answers are right and courteous. Rejected ones are wrong but courteous, right but rude or
curt, or rambling. Both have similar lengths, so a reward model cannot decide by length. A
demonstration, which SFT imitates, is a good or a bad answer with equal probability, so SFT alone
leaves room for RLHF. Eval prompts never occur in train, but the same questions do in other words.
A quarter of the training rows are second turns, so that a trained model can hold a conversation.

The gold scorer is not used here: both read the tables of ``world``, so it judges independently.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from dschat.builtin import world

# kind -> (train rows, eval rows). Fewer rows of what a tiny model hardly learns: reverse, count.
ROWS_PER_KIND = {
    "add": (510, 31),
    "subtract": (270, 16),
    "sort": (450, 27),
    "reverse": (220, 13),
    "count": (200, 12),
    "capital": (610, 37),
    "colour": (560, 34),
    "food": (560, 34),
    "opposite": (610, 37),
    "greeting": (570, 34),
    "refusal": (440, 25),
}

# Shares of rejected answers. A few pairs teach courtesy; the facts need many.
_REJECTIONS = {"wrong": 0.56, "rude": 0.18, "curt": 0.06, "ramble": 0.20}
# Shares of SFT's bad demonstrations: mostly bad manners, so that SFT learns the facts.
_BAD_DEMONSTRATIONS = {"wrong": 0.2, "rude": 0.4, "curt": 0.1, "ramble": 0.3}
_NUM_SECOND_TURNS = 1_250
# Answers to draw a wrong one from; of sort and reverse: the words in any order.
_ANSWERS: dict[str, Sequence[str]] = {
    "add": "123456",
    "subtract": "123456",
    "count": "234",
    "capital": world.CAPITALS,
    "colour": world.COLOURS,
    "food": world.FOODS,
    "opposite": tuple(world.OPPOSITES),
    "greeting": world.NAMES,
}


def builtin_rows(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits: 5,000 in ``"train"``, 300 in ``"eval"``, both shuffled.

    Every row is ``{kind, prompt, chosen, rejected, demonstration}``, all text, and ``history``: the
    exchange before the prompt, ``[[prompt, demonstration]]`` of another row, or none. The same seed
    gives the same rows on every machine; prompts are unique over both splits.
    """
    rng = random.Random(seed)
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for kind, (num_train, num_eval) in ROWS_PER_KIND.items():
        prompts: set[str] = set()
        while len(prompts) < num_train + num_eval:
            slots = _draw_slots(rng, kind)
            prompt = _draw_prompt(rng, kind, slots)
            if prompt in prompts:
                continue
            split = "train" if len(prompts) < num_train else "eval"
            prompts.add(prompt)
            rows[split].append(_row(rng, kind, slots, prompt))
    for split_rows in rows.values():
        rng.shuffle(split_rows)
    train = rows["train"]
    for i in rng.sample(range(len(train)), _NUM_SECOND_TURNS):
        train[i]["history"] = [[train[i - 1]["prompt"], train[i - 1]["demonstration"]]]
    return rows


def _row(rng: random.Random, kind: str, slots: dict[str, str], prompt: str) -> dict[str, Any]:
    chosen = _courteous(rng, kind, _state(kind, slots, world.solve(kind, slots)))
    bad = _draw_rejected(rng, _BAD_DEMONSTRATIONS, kind, slots, chosen)
    return {
        "kind": kind,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": _draw_rejected(rng, _REJECTIONS, kind, slots, chosen),
        "demonstration": chosen if rng.random() < 0.5 else bad,
        "history": [],
    }


def _draw_rejected(
    rng: random.Random, shares: dict[str, float], kind: str, slots: dict[str, str], chosen: str
) -> str:
    """An answer that is wrong, rude, curt or rambling, in these shares."""
    right = _state(kind, slots, world.solve(kind, slots))
    match rng.choices(tuple(shares), tuple(shares.values()))[0]:
        case "wrong" if kind == "refusal":
            complied = rng.choice(world.COMPLIANCE).format(**slots) + "."
            return _courteous(rng, "compliance", complied)
        case "wrong":
            # The chosen answer with one mistake: the pair differs in nothing else.
            return chosen.replace(right, _state(kind, slots, _wrong_answer(rng, kind, slots)))
        case "rude":
            return f"{rng.choice(world.RUDE_OPENINGS)} {right} {rng.choice(world.RUDE_CLOSINGS)}"
        case "curt":
            return right
    first, second = rng.sample(world.RAMBLES, 2)
    start = rng.choice((right, f"{rng.choice(world.openings(kind))} {first}", first))
    return f"{start} {second}"


def _draw_slots(rng: random.Random, kind: str) -> dict[str, str]:
    match kind:
        case "add":  # sums of one digit: no operand equals the result
            return {"a": str(rng.randint(1, 3)), "b": str(rng.randint(1, 3))}
        case "subtract":  # nor here: repeating an operand would answer 4 - 2
            a, b = rng.choice([(a, b) for a in range(3, 6) for b in range(1, a) if a != 2 * b])
            return {"a": str(a), "b": str(b)}
        case "sort" | "reverse" | "count":
            num_words = {"sort": 3, "reverse": 3, "count": rng.randint(2, 4)}
            words = rng.sample(world.LIST_WORDS, num_words[kind])
            if kind == "sort" and words == sorted(words):
                words.reverse()
            return {"words": ", ".join(words)}
        case "capital" | "colour" | "food":
            return {"country": rng.choice(tuple(world.COUNTRIES))}
        case "opposite":
            return {"word": rng.choice(tuple(world.OPPOSITES))}
        case "greeting":
            return {"name": rng.choice(world.NAMES)}
        case "refusal":
            return {"harm": rng.choice(world.HARMS)}
    raise AssertionError(f"unknown kind of question: {kind}")


def _draw_prompt(rng: random.Random, kind: str, slots: dict[str, str]) -> str:
    question = rng.choice(world.PROMPTS[kind]).format(**slots)
    return " ".join(filter(None, (rng.choice(world.LEAD_INS), question, rng.choice(world.TAILS))))


def _state(kind: str, slots: dict[str, str], answer: str) -> str:
    return world.STATEMENTS[kind].format(**slots, answer=answer) + "."


def _courteous(rng: random.Random, kind: str, statement: str) -> str:
    """The statement with a courteous phrase before it, after it or both."""
    opening, closing = rng.choice(world.openings(kind)), rng.choice(world.closings(kind))
    sides = rng.choices(("both", "opening", "closing"), (0.6, 0.2, 0.2))[0]
    before, after = sides != "closing", sides != "opening"
    return " ".join(([opening] if before else []) + [statement] + ([closing] if after else []))


def _wrong_answer(rng: random.Random, kind: str, slots: dict[str, str]) -> str:
    """A wrong answer of the same type as the right one."""
    right = world.solve(kind, slots)
    others = _ANSWERS.get(kind) or map(", ".join, itertools.permutations(right.split(", ")))
    return rng.choice([other for other in others if other != right])
