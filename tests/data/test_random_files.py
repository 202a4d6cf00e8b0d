"""Any file gives a table or a one-line error, never a traceback or a hang."""

import csv
import io
import json
import random

import pyarrow.parquet
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dschat.config import CommonConfig, UserError
from dschat.data.sources.adapters import PURPOSES, normalize
from dschat.data.sources.known_datasets import ADAPTERS, GENERIC
from dschat.data.sources.splits import load_examples

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(path, content, **knobs):
    """Every purpose and policy."""
    path.write_bytes(content)
    for purpose, policy in zip(PURPOSES, ("auto", "skip", "error"), strict=True):
        config = CommonConfig(
            data_path=[str(path)], on_bad_row=policy, data_split="1,1,1", eval_fraction=0.3
        )
        message = ""
        try:
            read_tables(config, purpose)
        except UserError as error:
            message = str(error)
        assert len(message.splitlines()) <= 1


def read_tables(config, purpose):
    for table in load_examples(config, purpose):
        assert isinstance(table, Dataset)
        table[:]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text"]), inner
        )
    ),
    max_leaves=8,
)
turn = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "tool"]), "content": anything}
)
columns = st.sampled_from(
    ["prompt", "chosen", "rejected", "question", "answer", "messages", "text"]
)
row = st.dictionaries(columns, anything | st.text(max_size=5) | st.lists(turn, max_size=3))


@quick
@given(st.lists(row | anything, max_size=4), st.sampled_from(["jsonl", "json", "nl.json"]))
def test_any_json(tmp_path, rows, kind):
    text = json.dumps(rows) if kind == "json" else "\r\n".join(map(json.dumps, rows))
    check(tmp_path / f"x.{kind}", text.encode())


@quick
@given(st.lists(st.lists(st.text(max_size=6), max_size=4), max_size=5), st.integers(0, 40))
def test_any_csv(tmp_path, rows, end):
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["prompt", "chosen", "rejected"], *rows])
    text = buffer.getvalue().encode("utf-8", "surrogatepass")
    check(tmp_path / "x.csv", text if end > 30 else text[: len(text) - end])


GOOD = '{"prompt": "é", "chosen": "c", "rejected": "d"}\n'.encode() * 3


@quick
@given(
    st.binary(max_size=60), st.sampled_from(["json", "jsonl", "csv", "tsv", "parquet", "jsonl.gz"])
)
def test_any_bytes(tmp_path, content, suffix):
    check(tmp_path / f"x.{suffix}", content)
    check(tmp_path / f"y.{suffix}", b"\xef\xbb\xbf" + GOOD + content + GOOD)


@quick
@given(st.integers(0, 2**32))
def test_good_files_with_bytes_changed_or_lost(tmp_path, seed):
    rng = random.Random(seed)
    rows = {"prompt": [f"p{i}" for i in range(5)], "chosen": ["c"] * 5}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "good.parquet")
    for content, suffix in (
        ((tmp_path / "good.parquet").read_bytes(), "parquet"),
        (json.dumps([json.loads(line) for line in GOOD.splitlines()]).encode(), "json"),
    ):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        check(tmp_path / f"x.{suffix}", bytes(broken[: rng.randint(0, 2 * len(broken))]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_row_through_any_adapter(data):
    adapter = data.draw(st.sampled_from([*ADAPTERS.values(), *GENERIC]))
    names = sorted({column.partition(".")[0] for column in adapter.columns})
    value = anything | st.lists(turn, max_size=3) | st.text(max_size=5)
    made = {name: data.draw(value) for name in names if data.draw(st.booleans())}
    keys = set()
    for purpose in PURPOSES:
        result = normalize(made, adapter, purpose)
        assert all(isinstance(text, str) for text in result.values())
        result["key"].encode()  # no lone surrogates are left
        keys.add(result["key"])
    assert len(keys) == 1  # otherwise prompts would leak from one step to another
