"""Reading, adapting, blending and splitting data sets; errors for unusable data."""

from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from data_files import load, pairs
from dialogues import REPLY, SYSTEM, USER, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.config import SFTConfig, UserError
from dschat.data.sources.adapters import Example
from dschat.data.sources.splits import cut, key_hash, open_source, parse_spec

# -- adapters


@pytest.mark.parametrize(
    ("row", "is_split"),
    [
        ({"prompt": "q", "response": "a"}, False),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, True),
        ({"prompt": "q", "completion": "a", "label": True}, True),
        ({"prompt": "q", "completions": ["a", "b"], "ranks": [1, 2]}, True),
    ],
)
def test_rows_that_step_2_compares_are_split(write, row, is_split):
    """By default; the rows of a given split are in any case."""
    columns = ["answers=completions", "ranks=ranks"] if "ranks" in row else None
    for data_split, expected in (("auto", is_split), ("2,4,4", True)):
        config = SFTConfig(data_split=data_split, columns=columns)
        assert open_source(write([row]), config).is_split(config) == expected


@pytest.mark.parametrize("row", [{"prompt": "", "a": 1}, {"messages": [], "a": 1}])
def test_a_column_that_was_found_need_not_be_named(write, row):
    with pytest.raises(UserError, match=r"no usable rows: .*\(it has: ") as error:
        load(write([row]), "rlhf")
    assert "--columns prompt=COLUMN" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "knobs"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {}),
        ({"prompt": "q", "completion": "a"}, {}),
        ({"prompt": "q", "response": "a"}, {}),
        ({"prompt": "q", "answer": "a", "id": 3}, {}),
        ({"Frage": "q", "gut": "a"}, {"columns": ["prompt=Frage", "chosen=gut"]}),
        ({"Frage": "q", "chosen": "a"}, {"columns": ["prompt=Frage"]}),
    ],
)
def test_text_columns(write, row, knobs):
    path = write([row])
    assert load(path, **knobs) == [Example("q", "a")]
    prompt_only = load(path, "rlhf", **knobs)
    assert [example.prompt for example in prompt_only] == ["q"]


def test_column_flags_override_the_usual_columns(write):
    path = write([{"prompt": "no", "q": "q", "chosen": "a", "rejected": "no", "worse": "b"}])
    found = load(path, "reward", columns=["prompt=q", "rejected=worse"])
    assert found == [Example("q", "a", "b")]


@pytest.mark.slow
def test_the_builtin_data_is_chat_and_sft_learns_its_demonstrations():
    from dschat.builtin.chat_rows import builtin_rows

    rows, held_out = (
        {(len(row["history"]), row["prompt"]): row for row in split}
        for split in builtin_rows().values()
    )
    for split, source in (("train", rows), ("eval", held_out)):
        for example in load("builtin/chat", split=split)[::9]:
            (*earlier, turn), (answer,) = example.prompt, example.chosen
            row = source[len(earlier) // 2, turn["content"]]
            assert turn["role"] == "user"
            assert earlier == [t for q, a in row["history"] for t in (USER(q), REPLY(a))]
            assert answer == REPLY(row["demonstration"])
    for example in load("builtin/chat", "reward")[::40]:
        row = rows[len(example.prompt) // 2, example.prompt[-1]["content"]]
        assert (example.chosen, example.rejected) == (
            [REPLY(row["chosen"])],
            [REPLY(row["rejected"])],
        )


def test_preferences_between_dialogues(write):
    start = [SYSTEM("s"), USER("u1"), REPLY("r1"), USER("u2")]
    whole = {"chosen": [*start, REPLY("yes")], "rejected": [*start, REPLY("no")]}
    expected = Example(start, [REPLY("yes")], [REPLY("no")])
    assert load(write([whole]), "reward") == [expected]
    # a text column that repeats the first turn does not double it
    assert load(write([{"prompt": "u1", **whole}], "b.jsonl"), "reward") == [expected]
    asked = {"prompt": "u1", "chosen": [REPLY("yes")], "rejected": [REPLY("no")]}
    assert load(write([asked], "c.jsonl"), "reward") == [chat("u1", "yes", "no")]


def test_answers_to_different_prompts_are_not_a_pair(write, caplog):
    rows = [
        {"chosen": [USER("u"), REPLY("yes")], "rejected": [USER("other"), REPLY("no")]},
        {"chosen": [USER("v"), REPLY("yes")], "rejected": [USER("v"), REPLY("no")]},
    ]
    assert [e.prompt for e in load(write(rows), "reward")] == [[USER("v")]]
    assert len(load(write(rows))) == 2


# -- bad rows and names


@pytest.mark.parametrize(
    ("path", "knobs", "words"),
    [
        ("nowhere/x.jsonl", {}, ["no such data file", "nowhere/x.jsonl"]),
        ("/nowhere/x", {}, ["no such data file"]),
        ("no-such/data", {}, ["no-such/data", "check the name"]),
        ("builtin/chess", {}, ["builtin/chat or builtin/arithmetic"]),
        ("builtin/chat:0", {}, ["weight", "above 0"]),
        ("builtin/chat:-1", {}, ["weight", "above 0"]),
        ("builtin/chat:nan", {}, ["weight", "above 0"]),
        ("builtin/chat", {"columns": ["prompt=Q"]}, ["--columns prompt=Q", "demonstration"]),
        ("builtin/chat", {"eval_data_path": ["gone.json"]}, ["--eval_data_path", "gone.json"]),
    ],
)
def test_errors_about_names_are_one_line(path, knobs, words):
    with pytest.raises(UserError) as caught:
        load(path, **knobs)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_step_without_rows_is_an_error(write):
    with pytest.raises(UserError, match="--data_split 1,0,0 leaves step 3 none of the 4"):
        load(write(pairs(4)), "rlhf", data_split="1,0,0")


# -- weights


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("org/name", ("org/name", 1.0)),
        ("org/name:0.5", ("org/name", 0.5)),
        ("C:/data/x.jsonl", ("C:/data/x.jsonl", 1.0)),
        ("a:b.jsonl:2", ("a:b.jsonl", 2.0)),
        ("x.jsonl:1e-1", ("x.jsonl", 0.1)),
        ("x.jsonl:", ("x.jsonl:", 1.0)),
        (":3", (":3", 1.0)),
        ("7", ("7", 1.0)),
    ],
)
def test_a_weight_follows_the_last_colon(spec, expected):
    assert parse_spec(spec) == expected


def test_an_existing_file_wins_over_a_weight(write):
    path = write("x", "data:2")
    assert parse_spec(path) == (path, 1.0)
    assert parse_spec(f"{path}:3") == (path, 3.0)


@pytest.mark.parametrize(("weight", "rows"), [("0.25", 10), ("1", 40), ("2", 80), ("2.5", 100)])
def test_a_weight_repeats_rows(write, weight, rows):
    a, b = write(pairs(40, "a"), "a.jsonl"), write(pairs(10, "b"), "b.jsonl")
    counts = Counter(example.prompt for example in load([f"{a}:{weight}", b]))
    assert sum(n for prompt, n in counts.items() if prompt[0] == "a") == rows
    assert [counts[f"b{i}"] for i in range(10)] == [1] * 10
    times = {counts[f"a{i}"] for i in range(40)}
    assert times == {"0.25": {0, 1}, "1": {1}, "2": {2}, "2.5": {2, 3}}[weight]
    again = Counter(example.prompt for example in load([f"{a}:{weight}", b]))
    assert again == counts


# -- splits


def parts_of(keys, shares, salt):
    return cut(np.array([key_hash(key, salt) for key in keys], np.uint64), shares).tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=60),
    st.tuples(*[st.integers(0, 5)] * 3).filter(any),
    st.randoms(use_true_random=False),
)
def test_cut_keeps_equal_keys_together_in_any_order(keys, shares, random):
    parts = parts_of(keys, shares, "salt")
    where = dict(zip(keys, parts, strict=True))
    assert parts == [where[key] for key in keys]
    largest = max(Counter(keys).values())
    for part, share in enumerate(shares):
        ideal = len(keys) * share / sum(shares)
        assert abs(parts.count(part) - ideal) <= largest
        assert share or not parts.count(part)
    shuffled = random.sample(keys, len(keys))
    assert parts_of(shuffled, shares, "salt") == [where[key] for key in shuffled]


def test_cut_sorts_keys_by_their_hashes():
    keys = [f"prompt {i}" for i in range(20)]
    order = sorted(keys, key=lambda key: blake2b(f"split:5:{key}".encode()).digest())
    expected = {key: 0 if i < 4 else 1 if i < 12 else 2 for i, key in enumerate(order)}
    assert parts_of(keys, (2, 4, 4), "split:5") == [expected[key] for key in keys]


def test_steps_get_disjoint_prompts_and_together_all(write):
    # prompts stand once to four times, text rows and the turns of a chat alike
    rows = [row for i, row in enumerate(pairs(120)) for _ in range(1 + i % 4)]
    chats = [{"messages": [USER(f"p{i}"), REPLY(f"hello {i}")]} for i in range(0, 240, 2)]
    paths = [write(rows), write(chats, "chats.jsonl")]
    parts = {}
    # the steps may be loaded in any order
    for purpose in ("rlhf", "sft"):
        examples = load(paths, purpose, data_split="2,4,4")
        parts[purpose] = {
            e.prompt if isinstance(e.prompt, str) else e.prompt[0]["content"] for e in examples
        }
    assert not parts["sft"] & parts["rlhf"]
    alone = {p: load(paths[0], p, data_split="2,4,4") for p in ("reward", "sft", "rlhf")}
    prompts = {p: {e.prompt for e in examples} for p, examples in alone.items()}
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == 120
    assert sum(map(len, alone.values())) == len(rows)
    assert abs(len(alone["sft"]) - 0.2 * len(rows)) <= 4
    other = {e.prompt for e in load(paths[0], "sft", data_split="2,4,4", seed=99)}
    assert other != prompts["sft"]


def test_a_bad_answer_does_not_move_other_rows_between_parts(write):
    rows = pairs(60)
    before = [e.prompt for e in load(write(rows), "rlhf", data_split="2,4,4")]
    for row in rows[::7]:
        row["rejected"] = ""
    path = write(rows, "bad.jsonl")
    assert [e.prompt for e in load(path, "rlhf", data_split="2,4,4")] == before
    assert not set(before) & {e.prompt for e in load(path, "reward", data_split="2,4,4")}


def test_auto_splits_only_data_with_rejected_answers(write, log):
    chats = [{"messages": [USER(f"p{i}"), REPLY("hello")]} for i in range(60)]
    ranked = [{"prompt": f"r{i}", "answers": ["a", "b"], "scores": [1, 2]} for i in range(60)]
    whole, paired = write(chats, "chats.jsonl"), [write(pairs(60)), write(ranked, "ranked.jsonl")]
    for purpose in ("sft", "rlhf"):
        assert len(load(whole, purpose, data_split="auto")) == 60
        for path in paired:
            examples = load(path, purpose, data_split="auto")
            assert examples == load(path, purpose, data_split="2,4,4")
            assert 0 < len(examples) < 30
    split = load(paired, "sft", data_split="2,4,4")
    log.clear()
    mixed = load([paired[0], whole, paired[1]], "sft", data_split="auto")
    texts = [e for e in mixed if isinstance(e.prompt, str)]
    assert texts == split
    assert len(mixed) - len(texts) == 60
    left = 120 - len(texts)
    assert f"({left} are for the other steps; see --data_split)" in log.text


# -- evaluation


def test_held_out_prompts_are_not_trained_on_in_any_step_or_source(write):
    a, b = write(pairs(100) * 2, "a.jsonl"), write(pairs(50), "b.jsonl")
    held, trained = {}, set()
    for purpose in ("sft", "reward", "rlhf"):
        knobs = {"eval_fraction": 0.1, "data_split": "2,4,4"}
        trained |= {e.prompt for e in load([a, b], purpose, **knobs)}
        held[purpose] = Counter(e.prompt for e in load([a, b], purpose, "eval", **knobs))
    assert held["sft"] == held["reward"] == held["rlhf"]
    assert not trained & set(held["sft"])
    assert len(trained) + len(held["sft"]) == 100
    assert abs(sum(held["sft"].values()) - 25) <= 2


def test_a_source_may_have_its_own_eval_split(write):
    write(pairs(8), "folder/train.jsonl")
    folder = write(pairs(3, "e"), "folder/test.jsonl").rpartition("/")[0]
    knobs = {"eval_fraction": 0.5}
    assert len(load(folder, **knobs)) == 8
    assert [e.prompt for e in load(folder, split="eval", **knobs)] == ["e0", "e1", "e2"]


def test_eval_data_path_replaces_the_held_out_share(write):
    path, held = write(pairs(10)), write(pairs(4, "e"), "eval.jsonl")
    knobs = {"eval_fraction": 0.5, "eval_data_path": [held]}
    assert len(load(path, **knobs)) == 10
    assert [e.prompt for e in load(path, split="eval", **knobs)] == ["e0", "e1", "e2", "e3"]


def test_at_most_max_eval_samples_and_always_the_same(write):
    path = write(pairs(40))
    knobs = {"eval_fraction": 0.5, "split": "eval"}
    some = load(path, max_eval_samples=7, **knobs)
    everything = [e.prompt for e in load(path, **knobs)]
    assert some == load(path, max_eval_samples=7, **knobs)
    assert len(everything) == 20
    assert {e.prompt for e in some} < set(everything)
    assert len(some) == 7
    assert load(path, max_eval_samples=0, **knobs) == []
