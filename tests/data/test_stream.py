"""Streaming: the same rows on every rank, steps with disjoint prompts, constant memory."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice

import datasets
import pytest
from data_files import listed, pairs, step_table
from dialogues import REPLY, USER
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import slow

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import CommonConfig, SFTConfig, UserError
from dschat.data.batches import PromptBatches, RowStream, StepBatches
from dschat.data.micro_batches import MicroBatchSize
from dschat.data.pretraining_text import text_dataset
from dschat.data.sources.adapters import PURPOSES, Example
from dschat.data.sources.stream import ExampleStream, shuffled

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def unwritable_cache(own_cache, tmp_path):
    """The cache is a file, so that writing to it fails."""
    (tmp_path / "cache").write_text("")


def stream_of(paths, purpose="sft", **knobs):
    knobs = {"streaming": True, "max_steps": 1, "shuffle_buffer_size": 50, **knobs}
    config = CommonConfig(data_path=listed(paths), **knobs)
    return ExampleStream(config, purpose)


def prompts(rows, num=None):
    return [Example.from_row(row).prompt for row in islice(iter(rows), num)]


@pytest.mark.slow
def test_steps_get_disjoint_prompts_in_their_shares(write):
    rows = [row for i, row in enumerate(pairs(300)) for _ in range(1 + i % 3)]
    path = write(rows)
    knobs = {"data_split": "2,4,4", "eval_fraction": 0.1, "max_eval_samples": 10_000}
    seen, held = {}, []
    for purpose in PURPOSES:
        stream = stream_of(path, purpose, **knobs)
        part = set(prompts(stream, 600))
        assert set(prompts(stream, 650)) == part  # every prompt, since the stream repeats
        seen[purpose] = part
        held.append(prompts(stream.held_out()))
    assert held[0] == held[1] == held[2]
    parts = [*seen.values(), set(held[0])]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 300
    for part, share in zip(parts, (0.18, 0.36, 0.36, 0.1), strict=True):
        assert abs(len(part) - 300 * share) < 30
    assert Counter(held[0]) == Counter(r["prompt"] for r in rows if r["prompt"] in set(held[0]))


def test_each_pass_is_another_permutation(write):
    path = write(pairs(30))
    stream = stream_of(path, data_split="1,0,0", eval_fraction=0.0)
    both = prompts(stream, 60)
    assert sorted(both[:30]) == sorted(both[30:]) == sorted(r["prompt"] for r in pairs(30))
    assert both[:30] != both[30:]
    assert prompts(stream, 60) == both  # a new iteration repeats the stream
    assert prompts(stream_of(path, seed=1, eval_fraction=0.0), 30) != both[:30]


@pytest.mark.parametrize("form", ["jsonl", *slow(["parquet", "json", "csv"])])
def test_sources_are_blended_by_their_rows_times_their_weights(write, tmp_path, form, log):
    """As in a table."""
    paths = []
    for name, num in (("a", 50), ("b", 500)):
        paths.append(str(tmp_path / f"{name}.{form}"))
        table = datasets.Dataset.from_list(pairs(num, name))
        getattr(table, f"to_{form.removesuffix('l')}")(paths[-1])
    stream = stream_of([f"{paths[0]}:3", paths[1]], data_split="1,0,0")
    counts = Counter(prompt[0] for prompt in prompts(stream, 4000))
    assert abs(counts["a"] / 4000 - 150 / 650) < 0.03
    listed = f"the stream takes 23.1% from {paths[0]}, 76.9% from {paths[1]} (by rows and weights)"
    assert listed in log.text


def test_a_source_of_unknown_length_is_blended_by_weights(write, hub, log):
    hub.splits = {"train": pairs(50, "a")}
    stream = stream_of(["owner/name:3", write(pairs(500, "b"))], data_split="1,0,0")
    counts = Counter(prompt[0] for prompt in prompts(stream, 4000))
    assert abs(counts["a"] / 4000 - 0.75) < 0.03
    assert "75.0% from" in log.text
    assert "weights alone: a source's rows are not known" in log.text


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.integers(1, 40), st.integers(0, 5))
def test_a_shuffle_loses_nothing_and_holds_no_more_than_its_size(num, size, seed):
    drawn = []

    def rows():
        for i in range(num):
            drawn.append(i)
            yield i

    out = []
    for row in shuffled(rows(), size, seed):
        out.append(row)
        assert len(drawn) - len(out) <= size
    assert sorted(out) == list(range(num))


def test_held_out_rows_are_the_first_and_bounded(write, tmp_path):
    path = write(pairs(400))
    stream = stream_of(path, eval_fraction=0.5, max_eval_samples=20)
    held = prompts(stream.held_out())
    assert len(held) == 20
    everything = prompts(stream_of(path, eval_fraction=0.5, max_eval_samples=999).held_out())
    assert held == everything[:20]
    assert len(stream_of(path, max_eval_samples=0).held_out()) == 0
    own = write(pairs(9, "e"), "eval.jsonl")
    named = stream_of(path, eval_data_path=[own], max_eval_samples=5)
    assert prompts(named.held_out()) == [f"e{i}" for i in range(5)]
    assert len(set(prompts(named, 400))) > 60  # nothing of its own is held out: 1/5 of 400 rows


def test_bad_rows_are_logged_once_and_follow_the_flag(write, log):
    rows = [*pairs(30), {"prompt": "", "chosen": "x"}]
    prompts(stream_of(write(rows), data_split="1,0,0"), 100)
    assert log.text.count("data.jsonl:31: no usable prompt") == 1
    with pytest.raises(UserError, match=r"data.jsonl:31: no usable prompt; .*--on_bad_row skip"):
        prompts(stream_of(write(rows), data_split="1,0,0", on_bad_row="error"), 100)


def test_auto_splits_only_data_with_rejected_answers(write):
    chats = [{"messages": [USER(f"p{i}"), REPLY("hello")]} for i in range(200)]
    paths = [write(chats, "chats.jsonl"), write(pairs(200))]
    knobs = {"data_split": "auto", "eval_fraction": 0.0}
    for purpose, share in (("sft", 0.2), ("rlhf", 0.4)):
        seen = prompts(stream_of(paths, purpose, **knobs), 1000)
        texts = {prompt for prompt in seen if isinstance(prompt, str)}
        assert len({p[0]["content"] for p in seen if not isinstance(p, str)}) == 200
        assert abs(len(texts) - 200 * share) < 30


def test_a_step_without_rows_is_an_error(write):
    for knobs in ({"data_split": "1,0,1"}, {"data_split": "1,1e-9,1"}):
        with pytest.raises(UserError, match="leaves step 2 none of the training rows"):
            stream_of(write(pairs(5)), "reward", **knobs)


# -- tokenized


STEP = {"streaming": True, "max_steps": 2, "eval_fraction": 0.2, "shuffle_buffer_size": 16}


def test_every_step_gets_its_rows(write):
    path = write(pairs(60))
    for purpose, column in zip(PURPOSES, ("input_ids", "chosen_ids", "prompt_ids"), strict=True):
        train, held_out = step_table(path, TOKENIZER, purpose, "both", data_split="1,1,1", **STEP)
        rows = train.encode(list(islice(train.examples(), 5)))
        assert len(rows) == 5
        assert all(row[column] for row in rows)
        assert set(rows[0]) == set(held_out.column_names)
        assert 0 < len(held_out) < 30


@pytest.mark.parametrize("size", [MicroBatchSize(2), MicroBatchSize(2, tokens=500)])
def test_a_global_batch_has_the_same_rows_for_any_ranks(write, size):
    stream = step_table(write(pairs(60)), TOKENIZER, **STEP)

    def steps(rank, world, first=0):
        batches = StepBatches(stream, 12, size, rank, world, seed=0)
        return list(islice(batches.epoch(0, first), 6 - first))

    whole = steps(0, 1)
    for world in (2, 5):
        ranks = [steps(rank, world) for rank in range(world)]
        for number, expected in enumerate(whole):
            assert sum((rank[number] for rank in ranks), []) == expected
    assert steps(0, 1, first=2) == whole[2:]


def test_unusable_rows_make_a_batch_smaller_for_any_number_of_ranks():
    stream = RowStream(lambda: iter(range(40)), lambda rows: [row for row in rows if row % 3])
    for world in (1, 2, 3):
        size = MicroBatchSize(2)
        ranks = [StepBatches(stream, 12, size, rank, world, seed=0) for rank in range(world)]
        rows = sum((next(batches.epoch(0)) for batches in ranks), [])
        assert rows == [row for row in range(12) if row % 3]


def test_rollouts_are_full_although_prompts_are_dropped(write):
    rows = [{"prompt": "x" * (1 + i % 12)} for i in range(300)]
    stream = step_table(write(rows), TOKENIZER, "rlhf", max_prompt_seq_len=6, **STEP)
    ranks = [list(islice(PromptBatches(stream, 10, rank, 3, seed=0), 8)) for rank in range(3)]
    whole = list(islice(PromptBatches(stream, 10, 0, 1, seed=0), 8))
    for number, rollout in enumerate(whole):
        assert len(rollout) == 10
        assert [list(ids) for rank in ranks for ids in rank[number]] == [list(r) for r in rollout]
        assert all(len(ids) <= 6 for ids in rollout)


def test_a_stream_without_usable_prompts_is_an_error(write):
    words = "no rows are left of the first 1000 .*--max_prompt_seq_len 1"
    with pytest.raises(UserError, match=words):
        step_table(write(pairs(50)), TOKENIZER, "rlhf", max_prompt_seq_len=1, **STEP)


def test_shuffled_labels_swap_half_of_a_stream(write):
    path = write(pairs(200))
    straight, mixed = (
        step_table(path, TOKENIZER, "reward", shuffle_labels=is_shuffled, **STEP)
        for is_shuffled in (False, True)
    )
    a, b = (stream.encode(list(islice(stream.examples(), 100))) for stream in (straight, mixed))
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert 30 < sum(same) < 70
    for x, y in zip(a, b, strict=True):
        assert {str(v) for v in x.values()} == {str(v) for v in y.values()}


def test_pretraining_text_streams(write):
    path = write([{"text": f"document {i}"} for i in range(50)])
    config = CommonConfig(streaming=True, max_steps=1, shuffle_buffer_size=8)
    stream = text_dataset(path, "text", TOKENIZER, block_len=16, config=config)
    steps = islice(StepBatches(stream, 4, MicroBatchSize(2), 0, 1, seed=0).epoch(0), 30)
    blocks = [row["input_ids"] for step in steps for row in step]
    assert len(blocks) == 120
    assert {len(block) for block in blocks} == {16}


def test_streaming_needs_max_steps():
    with pytest.raises(UserError, match="--streaming needs --max_steps"):
        SFTConfig(streaming=True).validate()
    SFTConfig(streaming=True, max_steps=1).validate()


RSS = """
import sys
from itertools import islice
from dschat.config import SFTConfig
from dschat.data.sources.stream import ExampleStream
from dschat.data.sources.splits import load_examples

def resident():  # MiB of anonymous memory, without mapped files
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))

path, how = sys.argv[1:]
config = SFTConfig(data_path=[path], streaming=how == "stream", max_steps=1, data_split="1,0,0")
before = resident()
if how == "stream":
    stream = ExampleStream(config, "sft")
    stream.held_out()
    most = max(resident() for _ in islice(iter(stream), 0, 190_000, 1000))
else:
    load_examples(config, "sft")
    most = resident()
print(most - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stream", "table"])
def test_memory_does_not_grow_with_the_file(how, tmp_path):
    """A file of 200 MB, read completely: memory grows by less than its texts take."""
    path = tmp_path / "big.jsonl"
    answer = "word " * 200
    with path.open("w") as file:
        for i in range(190_000):
            file.write(json.dumps({"prompt": f"question {i}", "chosen": answer}) + "\n")
    assert path.stat().st_size > 190e6
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "kept"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", RSS, str(path), how],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 100, f"{done.stdout} MiB"
