"""An agent that looks facts up in a folder: rows for SFT, the folder, and the agent of step 3.

    python examples/search_agent.py               # the rows and facts, into output/data/search
    python train.py --recipe search

A question is about a lighthouse: ``Who is the keeper of Norvik?`` The facts are made up, so no
model knows them: each file of the folder ``facts`` has one lighthouse, each line one fact. The
agent asks the model, which may write ``search: keeper Norvik``; it then gets the only fact with all
of these words. A demonstration, which SFT imitates, searches in half of the cases; the others
guess. Held-out questions are about other lighthouses.
"""

import itertools
import json
import random
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path("output/data/search")
NUM_LIGHTHOUSES = {"train": 3_000, "eval": 125}  # four questions each
ROLES = ("keeper", "owner", "cook", "painter")

_MOST_SEARCHES, _FOUND = 2, 0.2
_SEARCHES = 0.5  # share of the demonstrations that search
_FIRST_NAMES, _STARTS, _MIDDLES, _ENDS = map(
    str.split,
    (
        "Ada Emil Nora Karl Ida Otto Vera Hugo Lena Axel Mia Erik Rosa Paul Edda Finn",
        "Nor Bran Sol Vir Tor Gar Mal Ber Lin Ros Kar Fal Win Dor Hal Ost Ran Sten Var Kol",
        "da ki lo mu re sa ti vo na be",
        "vik dal berg lund holm stad mark fjord havn sund nes borg lin ster man rup",
    ),
)


async def run(client: Any, prompt: list[Any], answer: str) -> dict[str, float]:
    """Rewards the right name with 1, else a search that found it with 0.2.

    Neither pays for copying: an answer is right if it is the name and nothing else, and no fact has
    all words of its question.
    """
    messages, found, searches = list(prompt), False, 0
    while True:
        made = await client.chat.completions.create(model="actor", messages=messages)
        said = made.choices[0].message
        asked = re.match(r"\s*search:(.*)", said.content)
        if not asked or searches == _MOST_SEARCHES:
            break
        searches += 1
        result = search(asked[1])
        found = found or answer in result
        messages += [said, {"role": "user", "content": result}]
    is_right = said.content.strip().rstrip(".") == answer
    return {"reward": 1.0 if is_right else _FOUND * found, "searches": searches, "found": found}


def search(text: str) -> str:
    """The only fact with all words of ``text``, or how many there are."""
    facts = [_facts(FOLDER / "facts").get(word, frozenset()) for word in _words(text)]
    found = frozenset.intersection(*facts) if facts else ()
    return next(iter(found)) if len(found) == 1 else f"{len(found)} facts found"


@cache
def _facts(folder: Path) -> dict[str, frozenset[str]]:
    """The facts that have a word."""
    found = defaultdict(set)
    for file in folder.glob("*.txt"):
        for fact in file.read_text().splitlines():
            for word in _words(fact):
                found[word].add(fact)
    return {word: frozenset(facts) for word, facts in found.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def lighthouses(seed: int = 0) -> dict[str, dict[str, dict[str, str]]]:
    """Of both splits, the names of people by lighthouse and role."""
    rng = random.Random(seed)
    places = ["".join(p) for p in itertools.product(_STARTS, _MIDDLES, _ENDS)]
    names = iter(rng.sample(places, sum(NUM_LIGHTHOUSES.values())))
    return {
        split: {next(names): {role: _person(rng) for role in ROLES} for _ in range(count)}
        for split, count in NUM_LIGHTHOUSES.items()
    }


def search_rows(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits: ``{prompt, answer, demonstration}``, with lists of chat messages.

    The same seed gives the same rows on every machine.
    """
    rng = random.Random(seed)
    return {
        split: [_row(rng, place, *item) for place, people in of.items() for item in people.items()]
        for split, of in lighthouses(seed).items()
    }


def _row(rng: random.Random, place: str, role: str, person: str) -> dict[str, Any]:
    turns = [{"role": "assistant", "content": _person(rng)}]
    if rng.random() < _SEARCHES:
        turns = [
            {"role": "assistant", "content": f"search: {role} {place}"},
            {"role": "user", "content": fact(place, role, person)},
            {"role": "assistant", "content": person},
        ]
    prompt = [{"role": "user", "content": f"Who is the {role} of {place}?"}]
    return {"prompt": prompt, "answer": person, "demonstration": turns}


def fact(place: str, role: str, person: str) -> str:
    return f"The {role} of {place} lighthouse is {person}."


def _person(rng: random.Random) -> str:
    return f"{rng.choice(_FIRST_NAMES)} {rng.choice(_STARTS)}{rng.choice(_ENDS)}"


def main() -> None:
    (FOLDER / "facts").mkdir(parents=True, exist_ok=True)
    for of in lighthouses().values():
        for place, people in of.items():
            facts = [fact(place, *item) for item in people.items()]
            (FOLDER / "facts" / f"{place}.txt").write_text("\n".join(facts))
    for split, rows in search_rows().items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (FOLDER / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
