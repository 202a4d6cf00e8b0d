"""Rows of ranked answers: how they are read, what of them can be compared, and their batches."""

import pytest
from data_files import step_table
from dialogues import REPLY, USER

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import RewardConfig, UserError
from dschat.data.micro_batches import collate_pairs, ranked_pairs, row_tokens
from dschat.data.preference_rows import most_answers
from dschat.data.sources.adapters import Example, normalize, read_ranked
from dschat.data.sources.known_datasets import ColumnAdapter

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token
RANKED = {"prompt": "p", "answers": ["worse", "best", "worst", "bad"], "scores": [3, 9, 1, 3]}


@pytest.fixture
def table(write):
    """``table(*rows, flag=value)``: step 2's training table of rows in a file."""

    def make(*rows, **knobs):
        return step_table(write(list(rows)), TOKENIZER, "reward", **knobs)

    return make


def texts(row):
    """The answers in a row of the table."""
    ids = [row["chosen_ids"], row["rejected_ids"], *row.get("other_ids", ())]
    return [TOKENIZER.decode(each[row["prompt_length"] :]).removesuffix(EOS) for each in ids]


def test_scores_and_ranks_order_the_answers():
    assert read_ranked(["a", "b", "c"], [1, 3, 3], True) == (["b", "c", "a"], [0, 0, 1])
    assert read_ranked(["a", "b", "c"], [7, 2.5, 7], False) == (["b", "a", "c"], [0, 1, 1])
    assert read_ranked('["a", "b"]', "[1, 2]", True) == (["b", "a"], [0, 1])  # a CSV cell
    assert read_ranked(["a", "b"], ["2", "10"], True) == (["b", "a"], [0, 1])  # not as text
    assert ranked_pairs([0, 2, 1, 1]) == [(0, 1), (0, 2), (0, 3), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("answers", "scores", "why"),
    [
        (["a"], [1], "fewer than two answers to compare"),
        ([], [], "fewer than two answers to compare"),
        (["a", "b"], [1, 1.0], "answers that all tie"),
        (["a", "b"], [1, 2, 3], "3 ranks or scores for 2 answers"),
        (["a", "b"], [1, None], "a rank or score that is not a number"),
        (["a", "b"], [1, float("nan")], "a rank or score that is not a number"),
        (["a", "b"], [1, "N/A"], "a rank or score that is not a number"),
        (["a", "b"], [1, 10**400], "a rank or score that is not a number"),
        ("a", [1, 2], "no list of answers"),
        (None, [1, 2], "no list of answers"),
        (["a", "b"], 3, "no list of ranks or scores"),
        (["a", "b"], "[1,", "no list of ranks or scores"),
        (["a", " "], [1, 2], "an empty or unreadable ranked answer"),
        (["a", {"b": 5}], [1, 2], "neither text nor a list of turns"),
    ],
)
def test_a_row_that_cannot_be_ranked_says_why_and_still_has_its_prompt_and_columns(
    answers, scores, why
):
    row = {"prompt": "p", "answers": answers, "scores": scores}
    adapter = ColumnAdapter("prompt", answers="answers", scores="scores")
    made = normalize(row, adapter, "reward")
    assert why in made["problem"]
    assert made["key"] == "p"
    asked = normalize(row, adapter, "rlhf")
    assert not asked["problem"]
    assert Example.from_row(asked).columns.keys() == {"answers", "scores"}


def test_answers_may_be_turns():
    row = {"prompt": [USER("u")], "answers": [[REPLY("a")], "b"], "ranks": [2, 1]}
    made = normalize(row, ColumnAdapter("prompt", answers="answers", ranks="ranks"), "reward")
    assert Example.from_row(made) == Example([USER("u")], [REPLY("b")], [REPLY("a")])


def test_bad_rows_are_counted_or_refused(table, caplog):
    tied = {**RANKED, "scores": [1, 1, 1, 1]}
    assert len(table(RANKED, tied, {**RANKED, "scores": [1]})) == 1
    assert "1 with an unusable ranking (answers that all tie)" in caplog.text
    assert "1 with an unusable ranking (1 ranks or scores for 4 answers)" in caplog.text
    with pytest.raises(UserError, match=r"data.jsonl:2.*answers that all tie.*--on_bad_row skip"):
        table(RANKED, tied, on_bad_row="error")


def test_the_table_has_all_answers_and_for_dpo_the_best_and_the_worst(table):
    (row,) = table(RANKED)
    assert texts(row) == ["best", "worst", "worse", "bad"]
    assert row["ranks"] == [0, 2, 1, 1]
    assert most_answers(table(RANKED)) == 4
    (pair,) = table(RANKED, loss="dpo")
    assert texts(pair) == ["best", "worst"]
    assert set(pair) == {"chosen_ids", "rejected_ids", "prompt_length", "prompt_key"}
    alike = {name: row[name] for name in pair}
    assert alike == pair


def test_a_ranking_of_two_is_a_pair(table):
    (pair,) = table({"prompt": "p", "chosen": "yes", "rejected": "no"})
    (ranked,) = table({"prompt": "p", "answers": ["no", "yes"], "ranks": [2, 1]})
    assert ranked == pair
    assert (pair["other_ids"], pair["ranks"]) == ([], [])
    assert most_answers(table({"prompt": "p", "answers": ["no", "yes"], "ranks": [2, 1]})) == 2


def test_long_and_repeated_answers_are_left_out(table, log):
    long = " ".join(["word"] * 200)
    answers = {"answers": [long, "a", "b", "b", "c"], "scores": [9, 8, 7, 6, 5]}
    (row,) = table({"prompt": "p", **answers}, max_seq_len=32)
    assert (texts(row), row["ranks"]) == (["a", "c", "b"], [1, 4, 2])
    assert "1 lost an answer too long for --max_seq_len 32" in log.text
    with pytest.raises(UserError, match="1 dropped .an answer too long for --max_seq_len 32"):
        table({"prompt": "p", "answers": [long, "a"], "scores": [1, 2]}, max_seq_len=32)


def test_the_prompt_and_each_answer_are_computed_once():
    prompt, answers = [1, 2, 3, 4, 5], [[6, 0], [7, 7, 0], [8, 0], [9, 9, 9, 0]]
    chosen, rejected, *others = (prompt + answer for answer in answers)
    row = {"chosen_ids": chosen, "rejected_ids": rejected, "prompt_length": 5}
    row |= {"other_ids": others, "ranks": [0, 3, 1, 2]}
    pair = {"chosen_ids": [1, 6, 0], "rejected_ids": [1, 7, 0], "prompt_length": 1}
    batch = collate_pairs([row, pair])
    assert batch.rows.num_tokens == 5 + (2 + 3 + 2 + 4) + 1 + 2 + 2
    assert row_tokens(row) == (5 + 11, 9, 4, None, 0)
    assert batch.num_real == 2
    # sequences: both chosen, both rejected, the first row's others
    compared = list(zip(batch.better.tolist(), batch.worse.tolist(), strict=True))
    assert compared == [(0, 2), (0, 4), (0, 5), (4, 2), (4, 5), (5, 2), (1, 3)]
    assert batch.weights.tolist() == pytest.approx([1 / 6] * 6 + [1])
    last = batch.rows.input_ids[batch.rows.columns]
    assert last.tolist() == [0] * 6
    own = batch.rows.input_ids[batch.rows.columns - 1]
    assert own.tolist() == [6, 6, 7, 7, 8, 9]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"columns": ["answers=a"]}, "answers=COLUMN needs either ranks=COLUMN or scores="),
        ({"columns": ["scores=a"]}, "answers=COLUMN needs"),
        ({"columns": ["answers=a", "ranks=r", "chosen=c"]}, "leave out chosen"),
    ],
)
def test_column_flags_that_do_not_go_together(flags, words):
    with pytest.raises(UserError, match=words):
        RewardConfig(**flags).validate()


def test_columns_by_flags(table):
    row = {"question": "q", "chosen": "x", "list": [{"t": "a", "s": 1}, {"t": "b", "s": 2}]}
    flags = {"columns": ["answers=list.*.t", "scores=list.*.s"]}
    (made,) = table(row, **flags)
    assert texts(made) == ["b", "a"]
    with pytest.raises(UserError, match="--columns answers=lost is not in"):
        table(row, **{"columns": ["answers=lost", "scores=list.*.s"]})
