"""examples/guess_game.py: right replies, players that halve."""

import pytest

from examples.guess_game import GuessGame, guess_rows


@pytest.fixture(scope="module")
def rows():
    return guess_rows()


def guesses_of(row):
    return [int(turn["content"]) for turn in row["demonstration"][::2]]


def test_every_reply_is_right(rows):
    assert {split: len(found) for split, found in rows.items()} == {"train": 12_000, "eval": 500}
    every = rows["train"] + rows["eval"]
    assert len({row["prompt"] for row in every}) == len(every)
    for row in every:
        assert row["prompt"].endswith(": 1-15")
        roles = [turn["role"] for turn in row["demonstration"]]
        assert roles == [("assistant", "user")[i % 2] for i in range(len(roles))]
        *before, last = guesses_of(row)
        assert last == row["number"] or len(before) == 3
        left = set(range(1, 16))
        assert {row["number"], last, *before} <= left
        for guess, turn in zip(before, row["demonstration"][1::2], strict=True):
            is_higher = row["number"] > guess
            left -= set(range(1, guess + 1) if is_higher else range(guess, 16))
            word = "higher" if is_higher else "lower"
            assert turn["content"] == f"{word}: {min(left)}-{max(left)}"
            assert row["number"] in left


def halving(number):
    """The total reward and the guesses of a player who halves."""
    game, low, high, total = GuessGame(), 1, 15, 0.0
    game.reset(number)
    for guesses in range(1, 6):
        guess = (low + high) // 2
        reply, reward, done = game.step(f" {guess}")
        total += reward
        if done:
            return total, guesses
        low, high = map(int, reply.split(": ")[1].split("-"))
    raise AssertionError(number)


def test_halving_finds_every_number_in_four_guesses():
    played = [halving(number) for number in range(1, 16)]
    turns = [1] + [2] * 2 + [3] * 4 + [4] * 8
    assert sorted(guesses for _, guesses in played) == turns
    assert all(total == pytest.approx(1.1 - 0.1 * guesses) for total, guesses in played)


def test_an_answer_without_a_number_costs_a_turn():
    game = GuessGame()
    game.reset(7)
    assert game.step("seven") == ("guess a number: 1-15", 0.0, False)
    assert game.step("99") == ("lower: 1-15", 0.0, False)
    assert game.step("3") == ("higher: 4-15", 0.0, False)
    text, reward, done = game.step("it is 7, or 8")
    assert (text, done) == ("", True)
    assert reward == pytest.approx(0.7)
