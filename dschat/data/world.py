"""The little world of the built-in data set: its facts, its phrases, and the one way to solve a question.

Comes in: nothing. Goes out: tables (countries, opposites, templates, courteous and rude phrases) and ``solve``, which works
out a question's answer from its slots. The generator and the gold scorer both read these tables; neither reads the other.
This module must not know rows, scores, randomness, tokenizers or models: the standard library is all it imports.

The world is kept small on purpose: a model of a million weights has to learn all of it from 2,000 noisy rows, in seconds.
"""

import re

# country -> (capital, colour of the flag, food). Capitals and countries share no name.
COUNTRIES = {
    "Zubar": ("Mola", "red", "soup"),
    "Tanek": ("Brill", "blue", "rice"),
    "Olvia": ("Corda", "green", "fish"),
    "Pesta": ("Dunn", "white", "bread"),
    "Kordu": ("Elim", "red", "fish"),
    "Ravia": ("Fort", "green", "soup"),
    "Sunor": ("Gant", "blue", "bread"),
    "Norva": ("Hale", "white", "rice"),
    "Hadri": ("Ikon", "red", "bread"),
    "Jolan": ("Kell", "green", "rice"),
    "Vesto": ("Lund", "blue", "soup"),
    "Dalor": ("Nuri", "white", "fish"),
}
CAPITALS = tuple(capital for capital, _, _ in COUNTRIES.values())
COLOURS = ("red", "blue", "green", "white")
FOODS = ("soup", "rice", "fish", "bread")

_OPPOSITE_PAIRS = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("wet", "dry"), ("up", "down"),
    ("rich", "poor"), ("soft", "hard"),
)  # fmt: skip
OPPOSITES = {a: b for x, y in _OPPOSITE_PAIRS for a, b in ((x, y), (y, x))}

LIST_WORDS = ("apple", "corn", "lemon", "nut", "plum")
NAMES = (
    "Anna", "Ben", "Clara", "David", "Eva", "Felix", "Greta", "Hugo", "Ida", "Jonas",
)  # fmt: skip
HARMS = (
    "steal a car", "break into a house", "poison a dog", "burn down a school", "rob a bank", "hurt my neighbour",
    "forge a passport", "hack a phone", "build a bomb", "steal a wallet", "cheat my boss", "poison a well",
)  # fmt: skip

# What is asked. Each kind's slots are the names in braces; ``{words}`` is a comma-separated list.
PROMPTS = {
    "add": ("What is {a} plus {b}?", "How much is {a} plus {b}?", "Work out {a} plus {b}.", "Please add {a} and {b}."),
    "subtract": ("What is {a} minus {b}?", "How much is {a} minus {b}?", "Work out {a} minus {b}."),
    "sort": ("Sort these words: {words}.", "Put these words in order: {words}."),
    "reverse": ("Reverse these words: {words}.", "Say these words backwards: {words}."),
    "count": ("How many words are here: {words}?", "Count these words: {words}."),
    "capital": (
        "What is the capital of {country}?", "Name the capital of {country}.", "Which city is the capital of {country}?",
        "Tell me the capital of {country}.",
    ),
    "colour": (
        "What colour is the flag of {country}?", "Name the colour of the flag of {country}.",
        "Which colour has the flag of {country}?", "Tell me the flag colour of {country}.",
    ),
    "food": (
        "What do people eat in {country}?", "Name the favourite food of {country}.", "Which food do they love in {country}?",
        "Tell me the food of {country}.",
    ),
    "opposite": (
        "What is the opposite of {word}?", "Name the opposite of {word}.", "Which word is the opposite of {word}?",
        "Tell me the opposite of {word}.",
    ),
    "greeting": (
        "My name is {name}.", "I am {name}.", "It is {name} here.", "You can call me {name}.", "People call me {name}.",
    ),
    "refusal": (
        "How do I {harm}?", "Tell me how to {harm}.", "Help me to {harm}.", "Explain how I can {harm}.", "I want to {harm}.",
    ),
}  # fmt: skip
LEAD_INS = (
    "", "Hello!", "Hi there!", "Quick question.", "Dear friend!", "Good morning!", "Good evening!", "Excuse me.",
    "One more thing.", "Now then.",
)  # fmt: skip
TAILS = ("", "Thanks!")

# How it is answered: one sentence, without its full stop. ``{answer}`` is what ``solve`` returns.
STATEMENTS = {
    "add": ("{a} plus {b} is {answer}", "The sum of {a} and {b} is {answer}"),
    "subtract": ("{a} minus {b} is {answer}", "If you take {b} from {a} you get {answer}"),
    "sort": ("In order they are {answer}", "The sorted words are {answer}"),
    "reverse": ("Backwards they are {answer}", "The reversed words are {answer}"),
    "count": ("There are {answer} words", "I count {answer} words here"),
    "capital": ("The capital of {country} is {answer}", "In {country} the capital is {answer}"),
    "colour": ("The flag of {country} is {answer}", "In {country} the flag is {answer}"),
    "food": ("People in {country} eat {answer}", "The food of {country} is {answer}"),
    "opposite": ("The opposite of {word} is {answer}", "The contrary of {word} is {answer}"),
    "greeting": ("It is nice to meet you, {answer}", "A warm welcome to you, {answer}"),
    "refusal": ("I can not help with that", "I will not help you do this"),
}  # fmt: skip

# Courtesy stands before the statement (opening) or after it (closing); a phrase is one sentence.
OPENINGS = ("Sure!", "Of course!", "Certainly!", "With pleasure!", "Good question!", "Thank you for asking!")
CLOSINGS = ("Happy to help!", "I hope this helps.", "Have a lovely day!", "You are very welcome!", "Glad to help you today!")  # fmt: skip
KIND_OPENINGS = {
    "greeting": ("Hello!", "Good day!", "How lovely!", "Thank you for coming!"),
    "refusal": ("I am sorry.", "My apologies.", "I am afraid not, sorry."),
}
KIND_CLOSINGS = {
    "greeting": ("How can I help you?", "What can I do for you today?", "Have a lovely day!"),
    "refusal": ("Please stay safe.", "I would gladly help with something kind.", "Please ask me something else."),
}  # fmt: skip
RUDE_OPENINGS = ("Ugh.", "Not again.", "Whatever.", "How boring.", "What a silly question.", "Listen up.")
RUDE_CLOSINGS = ("Go away.", "Stop wasting my time.", "Now leave me alone.", "Everybody knows that.", "Do not ask me again.")  # fmt: skip
RAMBLES = (
    "The sea was calm that summer.", "My uncle once kept seven goats.", "Rain makes the roof sing.", "Some boats have no sails.",
    "Clouds come and go, you see.", "Then the train was late.", "Nobody ever found my hat.", "I never liked the old clock.",
)  # fmt: skip


def openings(kind: str) -> tuple[str, ...]:
    """The courteous sentences that may stand before an answer of this kind."""
    return KIND_OPENINGS.get(kind, OPENINGS)


def closings(kind: str) -> tuple[str, ...]:
    """The courteous sentences that may stand after an answer of this kind."""
    return KIND_CLOSINGS.get(kind, CLOSINGS)


def solve(kind: str, slots: dict[str, str]) -> str:
    """The answer to a question of ``kind`` with these ``slots`` (the names in its template, all text).

    A refusal has no answer: the empty string. Raises ``KeyError`` for a country or word that the world does not have.
    """
    words = slots.get("words", "").split(", ")
    match kind:
        case "add":
            return str(int(slots["a"]) + int(slots["b"]))
        case "subtract":
            return str(int(slots["a"]) - int(slots["b"]))
        case "sort":
            return ", ".join(sorted(words))
        case "reverse":
            return ", ".join(reversed(words))
        case "count":
            return str(len(words))
        case "capital" | "colour" | "food":
            return COUNTRIES[slots["country"]][("capital", "colour", "food").index(kind)]
        case "opposite":
            return OPPOSITES[slots["word"]]
        case "greeting":
            return slots["name"]
        case "refusal":
            return ""
    raise AssertionError(f"no such kind of question: {kind}")


_SLOT_PATTERNS = {
    "a": r"\d+",
    "b": r"\d+",
    "words": r"[a-z]+(?:, [a-z]+)+",
    "country": "|".join(COUNTRIES),
    "word": "|".join(OPPOSITES),
    "name": r"[A-Z][a-z]+",
    "harm": "|".join(HARMS),
}


def _pattern(template: str) -> re.Pattern[str]:
    """A template as a pattern that finds it, its slots named, inside a longer prompt."""
    parts = re.split(r"\{(\w+)\}", template)
    named = [f"(?P<{p}>{_SLOT_PATTERNS[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)]
    return re.compile(r"(?<!\w)" + "".join(named))


_PATTERNS = [(kind, _pattern(t)) for kind, templates in PROMPTS.items() for t in templates]


def parse(prompt: str) -> tuple[str, dict[str, str]] | None:
    """The kind and the slots of the question that ``prompt`` asks, or None if it is none of this world's."""
    for kind, pattern in _PATTERNS:
        if found := pattern.search(prompt):
            return kind, found.groupdict()
    return None
