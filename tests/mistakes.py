"""Reads the table of wrong inputs (``mistakes.txt``), and writes the files that it names."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from dschat.checkpoint.compatibility import settings_of
from dschat.checkpoint.manifest import manifest_bytes
from dschat.config import SFTConfig

QUERY = "model.layers.1.self_attn.q_proj.weight"
TABLE = Path(__file__).with_name("mistakes.txt")

STEP1 = "step1_sft/main.py --output_dir out --max_seq_len 64"
STEP2 = "step2_reward/main.py --output_dir out --max_seq_len 64"
STEP3 = "step3_rlhf/main.py --output_dir out --max_prompt_seq_len 32 --max_answer_seq_len 16"
GOOD_DATA = "--data_path {f}/good.jsonl"
WORDS = {  # in capitals in the table. NEW: a model is still to be named; STEP1 and 2: the data
    "STEP1": f"{STEP1} --model_name_or_path {{m}}/llama",
    "STEP2": f"{STEP2} --model_name_or_path {{m}}/llama",
    "STEP3": (
        f"{STEP3} --actor_model_name_or_path {{m}}/llama "
        f"--critic_model_name_or_path {{m}}/llama_reward {GOOD_DATA}"
    ),
    "NEW1": f"{STEP1} {GOOD_DATA}",
    "NEW2": f"{STEP2} {GOOD_DATA}",
    "NEW3": f"{STEP3} {GOOD_DATA}",
    "TRAIN": "train.py --output-dir out",
    "GOOD": f"--actor-model {{m}}/llama --reward-model {{m}}/llama {GOOD_DATA}",
    "DATA": "-m dschat.data",
    "GENERATE": f"-m dschat generate --out out.jsonl --path {{m}}/llama {GOOD_DATA}",
    "EVAL": f"-m dschat eval --path {{m}}/llama {GOOD_DATA}",
    "REPORT": "-m dschat.reporting",
}
PYTHON = """
from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine, SamplingParams
from dschat.distributed import entrypoint
from dschat.inference import InferenceEngine
from dschat.estimate import PlanRequest
from dschat.launch.preflight import check
from dschat.config import RLHFConfig
from dschat.rewards.reward_functions import RewardFunctions
from dschat.user_code import calls
from transformers import AutoTokenizer

load = InferenceEngine.from_pretrained

def engine(actor="{m}/llama", critic="{m}/llama_reward", tokenizer="{m}/llama", **values):
    tokenizer = tokenizer and AutoTokenizer.from_pretrained(tokenizer)
    return DeepSpeedRLHFEngine(actor, critic, tokenizer, 1, values)

def trainer():
    values = dict(max_prompt_seq_len=16, max_answer_seq_len=16)
    values |= dict(per_device_generation_batch_size=2, per_device_training_batch_size=2)
    return DeepSpeedPPOTrainer(engine(**values))

def scores(*functions, columns=(), **values):
    RewardFunctions(RLHFConfig(**values), functions).check_columns(columns)

def later(step, **fields):
    length = {} if step == 3 else {"max_seq_len": 64}
    check(PlanRequest({step: length | {"data_path": ["{f}/good.jsonl"]} | fields}, 1, 1))

entrypoint.run(lambda: CALL)
"""


class Mistake(NamedTuple):
    section: str
    name: str
    argv: list[str]  # what follows ``python``
    pieces: list[str]  # of the line, in their order: what is wrong, and how to fix it


def mistakes(folder: Path) -> list[Mistake]:
    """The table, for inputs in ``folder``."""
    texts = re.split(r"^# -- (.*)$", TABLE.read_text(), flags=re.MULTILINE)[1:]
    form = re.compile(r"^(\S.*)\n {4}\$ (.*)\n {4}error: (.*)$", re.MULTILINE)
    sections = zip(texts[::2], texts[1::2], strict=True)
    rows = [(section, *row) for section, text in sections for row in form.findall(text)]

    def placed(text: str) -> str:
        return text.replace("{f}", f"{folder}/files").replace("{m}", f"{folder}/models")

    return [
        Mistake(*names, [placed(word) for word in words_of(command)], placed(line).split(" ... "))
        for *names, command, line in rows
    ]


def words_of(command: str) -> list[str]:
    if command.startswith("python "):
        return ["-c", PYTHON.replace("CALL", command.removeprefix("python "))]
    return shlex.split(re.sub(r"\b[A-Z]+[123]?\b", lambda m: WORDS.get(m[0], m[0]), command))


def write_inputs(folder: Path) -> None:
    """``folder/files`` and ``folder/models``: data, recipes and checkpoints, most of them wrong."""
    write_files(folder / "files")
    write_models(folder / "models")


def write_files(folder: Path) -> None:
    row = {"prompt": "w3 w4", "chosen": "w5", "rejected": "w6"}

    def chat(text: str) -> dict:
        turns = (("user", text), ("assistant", "w5"))
        return {"messages": [{"role": role, "content": words} for role, words in turns]}

    rows = [{"prompt": f"w{i} w4", "chosen": "w5", "rejected": "w6"} for i in range(2, 62)]
    good = json.dumps(row)
    texts = {
        "good.jsonl": "\n".join(map(json.dumps, rows)),
        "empty.jsonl": "",
        "data.docx": "PK",
        "column.jsonl": json.dumps({"riddle": "a", "chosen": "b", "rejected": "c"}),
        "answers.jsonl": json.dumps({"prompt": "a", "chosen": "b"}),
        "ranked.jsonl": json.dumps({"prompt": "a", "answers": ["b", "c"], "scores": [1, 1]}),
        "broken.jsonl": f"{good}\n{good}\n{{not json\n",
        "broken.json": f"[{good},\n{{]",
        "lists.json": "[[1, 2], [3]]",
        "ragged.csv": "prompt,chosen\na,b\na,b,c\n",
        "wide.csv": "a,b,c\n1,2,3\n",
        "header.csv": "a,a,b\n1,2,3\n",
        "same.jsonl": json.dumps(row | {"rejected": "w5"}),
        "blank.jsonl": f"{good}\n{json.dumps(row | {'chosen': ''})}\n",
        "broken.jinja": "{% for m in messages %}",
        "zero.jinja": "{% for m in messages %}\n{{ 1 / 0 }}{% endfor %}",
        "endless.jinja": "{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}",
        "million.jinja": "\n{% for i in range(1000000) %}{% endfor %}",
        "import.jinja": "{% import 'os' as os %}",
        "row.jinja": "{% for m in messages %}\n"
        "{{ m.content }}{{ messages + 1 if m.content == 'w7 w8' }}{% endfor %}",
        "chats.jsonl": "\n".join(map(json.dumps, map(chat, ("w3 w4", "w7 w8")))),
        "stage2.json": json.dumps({"zero_optimization": {"stage": 2}}),
        "hpz.json": json.dumps({"zero_optimization": {"zero_hpz_partition_size": 2}}),
        "typed.json": json.dumps({"zero_optimization": {"reduce_bucket_size": "big"}}),
        "key.yaml": "leraning_rate: 1",
        "broken.yaml": "seed: 1\ndata_path: [",
        "type.yaml": "seed: many",
        "list.yaml": "- seed",
        "many.yaml": "seed: [1, 2]",
        "section.yaml": "stepp1: {seed: 1}",
        "twice.yaml": "learning_rate: 1\nseed: 1\nlearning-rate: 2",
        "empty.yaml": "# nothing yet",
        "recipe_twice.yaml": "step1:\n  seed: 1\n  seed: 2",
        "recipe_key.yaml": "step3: {kl_cof: 0.1}",
        "recipe_value.yaml": "step1: {seed: x}",
        "recipe_model.yaml": "model: {actor_model: [1, 2], reward_model: {a: b}}",
        "recipe_nodes.yaml": "launch: {num_nodes: -1}",
        "scores.py": "def tested(answers, tests):\n    return [1.0] * len(answers)\n",
        "broken.py": "def score(:",
        "not_ours.jsonl": good,
        "theirs.jsonl": good,
        "theirs.jsonl.settings.json": json.dumps({"--temperature": 0.5}),
        "few_answers.jsonl": json.dumps({"prompt": "w2 w4", "answer": "w5"}),
        "other_prompts.jsonl": json.dumps({"prompt": "w9 w4", "answer": "w5"}),
        "hosts": "alpha slots=2\nbeta\n",
        "two_hosts": "alpha slots=2\nbeta slots=2\n",
        "finished/COMPLETE": "",
        "finished/critic/config.json": "{}",
        "other/step1_sft/COMPLETE": '{"contents": {}}',
        "other/step1_sft/config.json": "{}",
        "other/step1_sft/training_config.yaml": "model_name_or_path: hub/other",
        "in_the_way/step1_sft": "",
        "saved/dataset_info.json": "{}",
        "saved/state.json": "{}",
    }
    unfinished = manifest_bytes(12, 1, settings_of(SFTConfig(lora_dim=4)), {}).decode()
    texts["unfinished/step_000012/manifest.json"] = unfinished
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    latin1 = {
        "latin1.jsonl": f'{good}\n{{"prompt": "\xe4", "chosen": "b", "rejected": "c"}}\n',
        "latin1.csv": "prompt,chosen\na\xe4,b\n",
        "binary.jsonl": "\x00\x01\x02\xff\xfe" * 40,
        "bad.parquet": "PAR1\x00\x00PAR1",
    }
    for name, text in latin1.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    (folder / "empty_folder").mkdir()
    for name in ("pipe.jsonl", "pipe.jinja", "pipe.yaml"):
        os.mkfifo(folder / name)


def write_models(folder: Path) -> None:
    import tiny_models

    folder.mkdir()
    good = tiny_models.ensure(folder, "llama")
    reward = tiny_models.ensure(folder, "llama_reward")
    adapted = tiny_models.ensure(folder, "llama_adapted")
    for name in ("bloom", "gpt2", "qwen3_moe"):
        tiny_models.ensure(folder, name)
    tiny_models.ensure(folder, "llama_reward_reversed").rename(folder / "reversed_reward")
    tiny_models.ensure(folder, "llama_reversed").rename(folder / "reversed")
    for name, damage in DAMAGES.items():
        source = {"reward": reward, "adapted": adapted}.get(name.rpartition("_")[2], good)
        damage(Path(shutil.copytree(source, folder / name)))


def _edited(edit):
    """A damage: ``edit`` changes the weights, by name."""

    def damage(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(path / "model.safetensors")
        edit(weights)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    return damage


def _last_is(value: float):
    """The last value of a weight is that of the other rank's shard."""
    return _edited(lambda weights: weights[QUERY][-1, -1].fill_(value))


def _truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _lost_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled(path: Path) -> None:
    import pickle

    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": print}))


def _bert(path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertForMaskedLM(config).save_pretrained(path)


def _adapter(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "facebook/opt-125m", "r": 4}
    (path / "adapter_config.json").write_text(json.dumps(settings))


def _changed(filename: str = "config.json", **fields):
    """A damage: these fields of a JSON file have other values."""

    def damage(path: Path) -> None:
        file = path / filename
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def _list_index(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("[1]")


DAMAGES = {
    "no_heads": _changed(num_attention_heads=0),
    "text_size": _changed(hidden_size="big"),
    "negative_size": _changed(intermediate_size=-48),
    "uneven_heads": _changed(num_attention_heads=3),
    "uneven_groups": _changed(num_attention_heads=4, num_key_value_heads=3, head_dim=8),
    "no_activation": _changed(hidden_act="gelo"),
    "no_dtype": _changed(dtype="float31"),
    "no_rope": _changed(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    "numbered": _changed(architectures=[1]),
    "wide": _changed(hidden_size=1_000_000),
    "list_config": lambda path: (path / "config.json").write_text("[1]"),
    "list_index": _list_index,
    "list_ends": lambda path: (path / "generation_config.json").write_text("[1]"),
    "text_ends": _changed("generation_config.json", eos_token_id="<eos>"),
    "nested_ends": _changed("generation_config.json", eos_token_id=[[0]]),
    "list_tokenizer": lambda path: (path / "tokenizer_config.json").write_text("[1]"),
    "text_tokenizer": _changed("tokenizer_config.json", model_max_length="long"),
    "number_tokenizer": _changed("tokenizer_config.json", added_tokens_decoder=5),
    "no_config": lambda path: (path / "config.json").unlink(),
    "broken_config": lambda path: (path / "config.json").write_text("{"),
    "missing_tensor": _edited(lambda weights: weights.pop(QUERY)),
    "nan": _last_is(float("nan")),
    "nan_reward": _last_is(float("nan")),
    "infinite": _last_is(float("-inf")),
    "integers": _edited(lambda weights: weights.update({QUERY: weights[QUERY].char()})),
    "truncated": _truncated,
    "truncated_reward": _truncated,
    "no_weights": lambda path: (path / "model.safetensors").unlink(),
    "lost_shard": _lost_shard,
    "pickled": _pickled,
    "bert": _bert,
    "adapter": _adapter,
    "half_adapted": lambda path: (path / "adapter/adapter_model.safetensors").unlink(),
    "dora_adapted": _changed("adapter/adapter_config.json", use_dora=True),
    "no_tokenizer": lambda path: [file.unlink() for file in path.glob("tokenizer*")],
    "broken_tokenizer": lambda path: (path / "tokenizer.json").write_text("{"),
}
