"""Writes rows to data files of any format, and loads one step's examples or ids from them."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow.parquet
from byte_tokenizers import trained

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig
from dschat.data.sources.adapters import PURPOSES, Example
from dschat.data.sources.readers import kind_of
from dschat.data.sources.splits import load_examples
from dschat.data.tokenize import preference_dataset, prompt_dataset, sft_dataset

STEPS = {
    "sft": (SFTConfig, sft_dataset),
    "reward": (RewardConfig, preference_dataset),
    "rlhf": (RLHFConfig, prompt_dataset),
}


def pairs(num: int, prefix: str = "p") -> list[dict]:
    """Rows of preferences, each with a prompt of its own."""
    return [
        {"prompt": f"{prefix}{i}", "chosen": f"a {i}", "rejected": f"b {i}"} for i in range(num)
    ]


def put(path: Path, rows: list) -> str:
    """``rows`` in the format of the file's suffix; CSV holds lists and objects as JSON. In a file
    called ``*.data.json`` they are the list ``data`` of one object.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = kind_of(path.name)
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w", newline="") as file:
        if kind in (".csv", ".tsv"):
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader()
            for row in rows:
                nested = {k: json.dumps(v) for k, v in row.items() if isinstance(v, (list, dict))}
                writer.writerow(row | nested)
        elif kind == ".json":
            json.dump({"data": rows} if path.name.endswith(".data.json") else rows, file, indent=1)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def only(purpose: str) -> dict:
    """Flags that give all rows of a source to one step."""
    return {
        "data_split": ",".join("1" if p == purpose else "0" for p in PURPOSES),
        "eval_fraction": 0.0,
    }


def load(paths, purpose="sft", split="train", **knobs) -> list[Example]:
    """The examples of one step, which gets all rows unless ``knobs`` say otherwise."""
    config = CommonConfig(data_path=listed(paths), **{**only(purpose), **knobs})
    return [Example.from_row(row) for row in load_examples(config, purpose)[split == "eval"]]


def listed(paths) -> list[str]:
    return paths if isinstance(paths, list) else [str(paths)]


def step_table(paths, tokenizer, purpose="sft", split="train", **knobs):
    """The ids of one step, which gets all rows unless ``knobs`` say otherwise."""
    config_class, make = STEPS[purpose]
    config = config_class(data_path=listed(paths), **{**only(purpose), **knobs})
    return make(config, tokenizer, split)


def sft_rows(folder: Path, row: dict, tokenizer, form: str = "jsonl", **knobs):
    """Step 1's rows of a file with one row."""
    return step_table(put(folder / f"row.{form}", [row]), tokenizer, **knobs)


def trained_texts(folder: Path, messages: list[dict], tokenizer, **knobs) -> list[list[str]]:
    """What step 1 trains of a dialogue: the texts with loss in each of its rows."""
    made = sft_rows(folder, {"messages": messages}, tokenizer, **knobs)
    return [trained(tokenizer, row) for row in made]
