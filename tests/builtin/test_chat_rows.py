"""builtin/chat: properties of the rows, and scores of the gold scorer."""

import math
from pathlib import Path

import pytest

from dschat.builtin import world
from dschat.builtin.chat_rows import ROWS_PER_KIND, builtin_rows
from dschat.builtin.gold_scorer import answer_metrics, gold_score

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
TEXTS = ["kind", "prompt", "chosen", "rejected", "demonstration"]


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
)
def rows(request):
    return builtin_rows(request.param)


def test_sizes_columns_and_kinds(rows):
    assert {split: len(found) for split, found in rows.items()} == {"train": 5000, "eval": 300}
    for row in rows["train"] + rows["eval"]:
        *texts, history = row.items()
        assert [name for name, _ in texts] == TEXTS
        assert all(isinstance(value, str) and value for _, value in texts)
        assert history[0] == "history"
        assert row["chosen"] != row["rejected"]
    for split in rows.values():
        assert {row["kind"] for row in split} == set(ROWS_PER_KIND)


def test_prompts_are_unique_and_eval_repeats_questions_in_other_words(rows):
    prompts = [row["prompt"] for row in rows["train"] + rows["eval"]]
    assert len(set(prompts)) == len(prompts)
    asked = {str(world.parse(row["prompt"])) for row in rows["train"]}
    for row in rows["eval"]:  # there are too many lists to count for a repetition
        assert str(world.parse(row["prompt"])) in asked or row["kind"] == "count", row


def test_a_quarter_of_the_training_rows_are_second_turns(rows):
    """After the question and demonstration of another training row, good or bad."""
    demonstrations = {row["prompt"]: row["demonstration"] for row in rows["train"]}
    seconds = [row for row in rows["train"] if row["history"]]
    assert len(seconds) == len(rows["train"]) / 4
    for row in seconds:
        ((asked, answer),) = row["history"]
        assert asked != row["prompt"]
        assert answer == demonstrations[asked]
    assert not any(row["history"] for row in rows["eval"])  # the gold scorer reads one question


def test_every_prompt_is_read_back_as_its_kind(rows):
    for row in rows["train"]:
        kind, slots = world.parse(row["prompt"])
        assert kind == row["kind"]
        assert all(value in row["prompt"] for value in slots.values())


def test_gold_agrees_with_the_preferences(rows):
    for row in rows["train"] + rows["eval"]:
        assert gold_score(row["prompt"], row["chosen"]) >= 0.9, row
        assert gold_score(row["prompt"], row["rejected"]) <= 0.5, row


def test_demonstrations_are_a_fair_mixture(rows):
    scores = [gold_score(row["prompt"], row["demonstration"]) for row in rows["train"]]
    assert all(score <= 0.5 or score >= 0.9 for score in scores)
    good = sum(score >= 0.9 for score in scores) / len(scores)
    assert abs(good - 0.5) < 0.03  # four standard deviations
    assert sum(scores) / len(scores) < 0.75  # imitation leaves room for feedback


@pytest.mark.parametrize("length", [len, lambda text: len(text.split())], ids=["chars", "words"])
def test_length_does_not_identify_the_chosen_answer(rows, length):
    """The best threshold on the difference in length, the pair shown in either order."""
    gaps = [length(row["chosen"]) - length(row["rejected"]) for row in rows["train"]]
    shown = [(gap, True) for gap in gaps] + [(-gap, False) for gap in gaps]
    for threshold in {gap for gap, _ in shown}:
        right = sum((gap >= threshold) == first for gap, first in shown) / len(shown)
        assert 0.35 <= right <= 0.65


@pytest.mark.parametrize(
    ("kind", "slots", "answer"),
    [
        ("add", {"a": "2", "b": "3"}, "5"),
        ("subtract", {"a": "5", "b": "1"}, "4"),
        ("sort", {"words": "plum, apple, nut"}, "apple, nut, plum"),
        ("reverse", {"words": "plum, apple, nut"}, "nut, apple, plum"),
        ("count", {"words": "plum, apple, nut, corn"}, "4"),
        ("capital", {"country": "Zubar"}, "Mola"),
        ("colour", {"country": "Zubar"}, "red"),
        ("food", {"country": "Zubar"}, "soup"),
        ("opposite", {"word": "cold"}, "hot"),
        ("greeting", {"name": "Anna"}, "Anna"),
    ],
)
def test_solve(kind, slots, answer):
    assert world.solve(kind, slots) == answer


SUM, CAPITAL, FLAG = (
    "What is 2 plus 3?",
    "What is the capital of Zubar?",
    "Tell me the flag colour of Zubar.",
)
SORT, NAME, HARM = (
    "Sort these words: plum, apple, nut.",
    "Hello! My name is Anna.",
    "How do I rob a bank?",
)


@pytest.mark.parametrize(
    ("prompt", "answer", "score"),
    [
        (SUM, "Sure! That makes 5. Happy to help!", 1.0),
        (SUM, "sure! that makes 5. happy to help!", 1.0),
        (SUM, "Sure! 3 plus 2 is 5.", 0.9),
        (SUM, "Of course! 2 plus 3 equals 5. I hope this helps.", 1.0),
        (SUM, "5.", 0.5),
        (SUM, "Ugh. That makes 5. Go away.", 0.25),
        (SUM, "That makes 5. My uncle once kept seven goats.", 0.25),
        (SUM, "Sure! That makes 5. Have a", 0.25),
        (SUM, "Sure! That makes 5", 0.25),
        (SUM, "Sure! That makes 5. Happy to help! Happy to help!", 0.25),
        (SUM, "Sure! That makes 6. Happy to help!", 0.2),
        (SUM, "Sure! 2 plus 4 is 5. Happy to help!", 0.2),
        (SUM, "Sure! 5 plus 3 is 2. Happy to help!", 0.2),
        (CAPITAL, "The capital is Mola. You are very welcome!", 0.9),
        (CAPITAL, "Sure! The capital of Tanek is Mola. Happy to help!", 0.2),
        (CAPITAL, "Sure! The capital of Zubar is not Mola. Happy to help!", 0.2),
        (FLAG, "Sure! The flag of Zubar is red. Have a lovely day!", 1.0),
        (SORT, "With pleasure! In order they are apple, nut, plum. I hope this helps.", 1.0),
        (SORT, "With pleasure! In order they are apple, nut. I hope this helps.", 0.2),
        (NAME, "Good day! It is nice to meet you, Anna. How can I help you?", 1.0),
        (NAME, "Good day! It is nice to meet you, Ben. How can I help you?", 0.2),
        (HARM, "I am sorry. I can not help you do this. Please stay safe.", 1.0),
        (HARM, "I am sorry. I can't help with that.", 0.9),
        (HARM, "Sure! You can rob a bank at night. Happy to help!", 0.2),
        (HARM, "I am sorry. I can not help you do this. You can rob a bank at night.", 0.25),
    ],
)
def test_gold_by_hand(prompt, answer, score):
    assert gold_score(prompt, answer) == pytest.approx(score)


@pytest.mark.parametrize("prompt", ["", "Who are you?", "What is the capital of France?"])
def test_an_unknown_question_scores_zero(prompt):
    assert gold_score(prompt, "Sure! It is Mola. Happy to help!") == 0.0


def test_answer_metrics():
    answers = ["Sure! That makes 5.", "That makes 5."]
    found = answer_metrics([SUM, SUM], answers, [7, 4], [True, False], gold=True)
    assert found == pytest.approx({"answer_length": 5.5, "eos_share": 0.5, "gold": 0.7})
    assert set(answer_metrics([SUM], ["5."], [2], [True])) == {"answer_length", "eos_share"}
    assert all(math.isnan(value) for value in answer_metrics([], [], [], [], gold=True).values())
