"""Measures step 1 on dialogues whose template rewrites earlier turns: what sharing tokens saves.

    python benchmarks/dialogue_rows.py            # 24 dialogues of 6 turns

A template as Qwen3's drops the thoughts of earlier turns, so each turn is a row. The sides take
turns at optimizer steps of 12 rows with a Qwen3 of random weights, in fp32 on one core: rows that
share nothing, rows that share what is in their micro-batch, and `--shuffle dialogues`. One JSON
line each: tokens computed in an epoch, and the median of the processor's seconds per step.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import environment
from transformers import Qwen3Config, Qwen3ForCausalLM

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.config import SFTConfig
from dschat.data.tokenize import sft_dataset
from dschat.models.heads import LanguageModel
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.deepspeed_engine import trained_engine, zero_settings
from dschat.supervised import setup
from dschat.supervised.loop import SFTTask, _micro_batches, train_step

TEMPLATE = """{%- set ns = namespace(last=0) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 * 2 %}{% endfor -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}{{ m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def dialogues(count: int, turns: int) -> list[dict]:
    """Of questions of 3 to 12 words, thoughts of 6 to 24 and answers of 6 to 18."""
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        words = "".join(rng.choices("abcdeiou", k=5)), "the", "of", "number", "because", "so"
        return " ".join(rng.choice(words) for _ in range(rng.randint(low, high)))

    def turn() -> list[dict[str, str]]:
        answer = {"role": "assistant", "content": text(6, 18), "reasoning_content": text(6, 24)}
        return [{"role": "user", "content": text(3, 12)}, answer]

    return [{"messages": [m for _ in range(turns) for m in turn()]} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dialogues", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init()
    with tempfile.TemporaryDirectory() as folder:
        data, template = Path(folder, "rows.jsonl"), Path(folder, "template.jinja")
        data.write_text("\n".join(map(json.dumps, dialogues(args.dialogues, args.turns))))
        template.write_text(TEMPLATE)
        config = SFTConfig(
            data_path=[str(data)],
            eval_fraction=0.0,
            max_seq_len=4096,
            per_device_train_batch_size=12,
            max_tokens_per_micro_batch=4096,
        )
        model = resolve_model(config.model_name_or_path)
        tokenizer = load_tokenizer(model, "--model", chat_template=str(template))
        table = sft_dataset(config, tokenizer)
    shape = Qwen3Config(vocab_size=len(tokenizer), **SIZES, **HEADS)
    engine = trained_engine(
        Qwen3ForCausalLM(shape), config, "", zero_settings(config), LanguageModel, 1000
    )
    engine.train()
    alone, task = table.remove_columns(["dialogue", "shared_length"]), SFTTask()
    sides = {}
    for name, rows, together in (
        ("rows share nothing", alone, ""),
        ("rows share", table, ""),
        ("--shuffle dialogues", table, "dialogue"),
    ):
        batches, _ = setup.step_batches(config, rows, [], together)
        sides[name] = batches.size, list(batches.epoch(0)), []
    for step in range(-1, args.steps):  # the first one allocates
        for size, steps, seconds in sides.values():
            started = time.process_time()
            train_step(engine, task, steps[step % len(steps)], size)
            seconds.append(time.process_time() - started)
    for name, (size, steps, seconds) in sides.items():
        parts = (part for rows in steps for part in _micro_batches(task, rows, size))
        tokens = sum(part.rows.num_tokens for part in parts)
        median = round(statistics.median(seconds[1:]), 2)
        found = {"side": name, "rows": len(table), "tokens": tokens, "cpu_s_per_step": median}
        print(json.dumps(found | environment(dist.device())))


if __name__ == "__main__":
    main()
