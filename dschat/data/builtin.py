"""The built-in data set: 5,300 short preference examples about a little world, from one seed.

Comes in: a seed. Goes out: rows of text, ``kind, prompt, chosen, rejected, demonstration``, split into train and eval. Chosen
is right and courteous; rejected is wrong but courteous, right but rude or curt, or rambling; the lengths of the two are
alike, so that a reward model must read them. A demonstration, what SFT imitates, is either of the two by a fair coin.
Eval prompts never occur in train, yet what they ask does, in other words.

This module must not know the gold scorer, tokenizers or models: the standard library is all it imports.
"""

import random

from dschat.data import world

# kind -> (train rows, eval rows)
ROWS_PER_KIND = {
    "add": (450, 27),
    "subtract": (270, 17),
    "sort": (450, 27),
    "reverse": (450, 27),
    "count": (370, 22),
    "capital": (520, 31),
    "colour": (470, 28),
    "food": (470, 28),
    "opposite": (560, 34),
    "greeting": (440, 27),
    "refusal": (550, 32),
}

# Held-out prompts to look at and talk to; with seed 0 they are rows of eval.
FIXED_PROMPTS: list[str] = []

_REJECTIONS = {"wrong": 0.5, "rude": 0.18, "curt": 0.08, "ramble": 0.24}
_COMPLIANCE = ("You can {harm} at night", "To {harm} you need a friend", "It is easy to {harm}")


def builtin_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Rows of the two splits: ``{"train": 5,000 rows, "eval": 300 rows}``, in a shuffled order.

    Every row is ``{kind, prompt, chosen, rejected, demonstration}``, all text. The same seed gives the same rows on every
    machine and Python; prompts are unique over both splits.
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
    answer = world.solve(kind, slots)
    chosen = _courteous(rng, kind, _state(rng, kind, slots, answer))
    rejection = rng.choices(tuple(_REJECTIONS), tuple(_REJECTIONS.values()))[0]
    if rejection == "wrong" and kind != "refusal":
        # Word for word the chosen answer but for the mistake: nothing else can tell the two apart.
        statement = rng.choice(world.STATEMENTS[kind])
        wrong = _fill(statement, slots, _wrong_answer(rng, kind, slots))
        chosen = _courteous(rng, kind, _fill(statement, slots, answer))
        rejected = chosen.replace(_fill(statement, slots, answer), wrong)
    else:
        rejected = _reject(rng, rejection, kind, slots)
    return {
        "kind": kind,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "demonstration": rng.choice((chosen, rejected)),
    }


def _draw_slots(rng: random.Random, kind: str) -> dict[str, str]:
    match kind:
        case "add":  # sums of one digit: no operand equals the result
            return {"a": str(rng.randint(1, 4)), "b": str(rng.randint(1, 4))}
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


def _state(rng: random.Random, kind: str, slots: dict[str, str], answer: str) -> str:
    return _fill(rng.choice(world.STATEMENTS[kind]), slots, answer)


def _fill(template: str, slots: dict[str, str], answer: str = "") -> str:
    return template.format(**slots, answer=answer) + "."


def _courteous(rng: random.Random, kind: str, statement: str) -> str:
    """The statement with courtesy before it, after it or on both sides."""
    opening, closing = rng.choice(world.openings(kind)), rng.choice(world.closings(kind))
    sides = rng.choices(("both", "opening", "closing"), (0.6, 0.2, 0.2))[0]
    before, after = sides != "closing", sides != "opening"
    return " ".join(([opening] if before else []) + [statement] + ([closing] if after else []))


def _reject(rng: random.Random, rejection: str, kind: str, slots: dict[str, str]) -> str:
    right = _state(rng, kind, slots, world.solve(kind, slots))
    match rejection:
        case "wrong":
            return _courteous(rng, "compliance", _fill(rng.choice(_COMPLIANCE), slots))
        case "rude":
            return f"{rng.choice(world.RUDE_OPENINGS)} {right} {rng.choice(world.RUDE_CLOSINGS)}"
        case "curt":
            return right
        case "ramble":
            first, second = rng.sample(world.RAMBLES, 2)
            opening = rng.choice(world.openings(kind))
            return rng.choice((f"{right} {first}", f"{opening} {first} {second}", f"{first} {second}"))
    raise AssertionError


def _wrong_answer(rng: random.Random, kind: str, slots: dict[str, str]) -> str:
    """An answer of the right sort that is not the right one."""
    right = world.solve(kind, slots)
    match kind:
        case "add" | "subtract":
            others = [str(n) for n in range(1, 10)]
        case "count":
            others = [str(n) for n in range(2, 6)]
        case "sort" | "reverse":
            words = right.split(", ")
            others = [", ".join(rng.sample(words, len(words))) for _ in range(8)]
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
