"""``builtin/chat``: 5,300 short preference examples about a little world, from one seed.

Comes in: a seed. Goes out: rows of text, ``kind, prompt, chosen, rejected, demonstration``, in two
splits. Chosen is right and courteous; rejected is wrong but courteous, right but rude or curt, or
rambling. The lengths of the two are alike, so that a reward model must read them. A demonstration,
what SFT imitates, is by a fair coin a chosen answer or a bad one: SFT alone is not the best policy.
Eval prompts never occur in train, yet what they ask does, in other words.

This module must not know the gold scorer, tokenizers or models: it needs the standard library and
the world's tables alone.
"""

import itertools
import random

from dschat.builtin import world

# kind -> (train rows, eval rows). Few rows where a tiny model learns little: reverse and count.
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

# Held-out prompts to look at and talk to; with seed 0 they are rows of eval.
FIXED_PROMPTS = [
    "Good morning! What is 2 plus 1?",
    "Excuse me. Work out 5 minus 3.",
    "Hi there! Put these words in order: plum, apple, nut. Thanks!",
    "Good morning! Reverse these words: apple, corn, plum. Thanks!",
    "Hello! Which city is the capital of Vesto? Thanks!",
    "What colour is the flag of Ravia?",
    "Quick question. What do people eat in Ravia?",
    "Hi there! Tell me the opposite of slow. Thanks!",
    "I am Anna.",
    "Hi there! How do I build a bomb?",
]

# What a rejected answer is. Courtesy is learned from a few pairs, the facts are not.
_REJECTIONS = {"wrong": 0.56, "rude": 0.18, "curt": 0.06, "ramble": 0.20}
# What the bad half of SFT's demonstrations is: mostly bad manners, so that it learns the facts.
_BAD_DEMONSTRATIONS = {"wrong": 0.2, "rude": 0.4, "curt": 0.1, "ramble": 0.3}


def builtin_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The rows of both splits: 5,000 in ``"train"``, 300 in ``"eval"``, each in a shuffled order.

    Every row is ``{kind, prompt, chosen, rejected, demonstration}``, all text. The same seed gives
    the same rows on every machine; prompts are unique over both splits.
    """
    rng = random.Random(seed)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "eval": []}
    for kind, (num_train, num_eval) in ROWS_PER_KIND.items():
        asked: set[str] = set()
        while len(asked) < num_train + num_eval:
            slots = _draw_slots(rng, kind)
            prompt = _draw_prompt(rng, kind, slots)
            if prompt in asked:
                continue
            split = "train" if len(asked) < num_train else "eval"
            asked.add(prompt)
            rows[split].append(_row(rng, kind, slots, prompt))
    for split in rows.values():
        rng.shuffle(split)
    return rows


def _row(rng: random.Random, kind: str, slots: dict[str, str], prompt: str) -> dict[str, str]:
    chosen = _courteous(rng, kind, _state(kind, slots, world.solve(kind, slots)))
    bad = _draw_rejected(rng, _BAD_DEMONSTRATIONS, kind, slots, chosen)
    return {
        "kind": kind,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": _draw_rejected(rng, _REJECTIONS, kind, slots, chosen),
        "demonstration": chosen if rng.random() < 0.5 else bad,
    }


def _draw_rejected(
    rng: random.Random, shares: dict[str, float], kind: str, slots: dict[str, str], chosen: str
) -> str:
    """An answer that is wrong, rude, curt or rambling, in these shares."""
    rejection = rng.choices(tuple(shares), tuple(shares.values()))[0]
    if rejection == "wrong" and kind != "refusal":
        # Word for word the chosen answer but for the mistake: nothing else tells the two apart.
        right = _state(kind, slots, world.solve(kind, slots))
        return chosen.replace(right, _state(kind, slots, _wrong_answer(rng, kind, slots)))
    return _reject(rng, rejection, kind, slots)


def _draw_slots(rng: random.Random, kind: str) -> dict[str, str]:
    match kind:
        case "add":  # sums of one digit: no operand equals the result
            return {"a": str(rng.randint(1, 3)), "b": str(rng.randint(1, 3))}
        case "subtract":  # nor here: 4 - 2 would be answered by repeating the question
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
    raise AssertionError(f"no such kind of question: {kind}")


def _draw_prompt(rng: random.Random, kind: str, slots: dict[str, str]) -> str:
    question = rng.choice(world.PROMPTS[kind]).format(**slots)
    return " ".join(filter(None, (rng.choice(world.LEAD_INS), question, rng.choice(world.TAILS))))


def _state(kind: str, slots: dict[str, str], answer: str) -> str:
    return world.STATEMENTS[kind].format(**slots, answer=answer) + "."


def _courteous(rng: random.Random, kind: str, statement: str) -> str:
    """The statement with courtesy before it, after it or on both sides."""
    opening, closing = rng.choice(world.openings(kind)), rng.choice(world.closings(kind))
    sides = rng.choices(("both", "opening", "closing"), (0.6, 0.2, 0.2))[0]
    before, after = sides != "closing", sides != "opening"
    return " ".join(([opening] if before else []) + [statement] + ([closing] if after else []))


def _reject(rng: random.Random, rejection: str, kind: str, slots: dict[str, str]) -> str:
    right = _state(kind, slots, world.solve(kind, slots))
    match rejection:
        case "wrong":
            complied = rng.choice(world.COMPLIANCE).format(**slots) + "."
            return _courteous(rng, "compliance", complied)
        case "rude":
            return f"{rng.choice(world.RUDE_OPENINGS)} {right} {rng.choice(world.RUDE_CLOSINGS)}"
        case "curt":
            return right
        case "ramble":
            first, second = rng.sample(world.RAMBLES, 2)
            start = rng.choice((right, f"{rng.choice(world.openings(kind))} {first}", first))
            return f"{start} {second}"
    raise AssertionError(f"no such way to be rejected: {rejection}")


def _wrong_answer(rng: random.Random, kind: str, slots: dict[str, str]) -> str:
    """An answer of the right sort that is not the right one."""
    right = world.solve(kind, slots)
    match kind:
        case "add" | "subtract":
            others = [str(n) for n in range(1, 7)]
        case "count":
            others = [str(n) for n in range(2, 5)]
        case "sort" | "reverse":
            words = right.split(", ")
            others = [", ".join(order) for order in itertools.permutations(words)]
        case "capital":
            others = list(world.CAPITALS)
        case "colour":
            others = list(world.COLOURS)
        case "food":
            others = list(world.FOODS)
        case "opposite":
            others = list(world.OPPOSITES)
        case "greeting":
            others = list(world.NAMES)
    return rng.choice([other for other in others if other != right])
