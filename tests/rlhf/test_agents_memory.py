"""Fifty rollouts of agents lose no token, and leave no page, object, thread or file behind."""

import asyncio
import gc
import logging
import os
import resource
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
sys.path.insert(0, str(Path(__file__).parent))

from test_agents import prompts_of, trainer_of  # noqa: E402

KINDS = ("talks", "begins again", "fails", "leaves")
LIMIT_S = 20.0
told = Counter()  # tokens of answers, by the kind of agent that got them


async def agent(client, prompt, kind, requests):
    messages = list(prompt)
    for _ in range(requests):
        asked = client.chat.completions.create(model="actor", messages=messages, max_tokens=4)
        try:
            made = await asyncio.wait_for(asked, 0.001 if kind == "leaves" else None)
        except asyncio.TimeoutError:
            continue
        told[kind] += made.usage.completion_tokens
        if kind == "fails":
            raise ValueError(kind)
        if kind == "talks":
            messages += [made.choices[0].message, {"role": "user", "content": "More."}]
    return 1.0


def roll_out(trainer, kinds, requests):
    """Returns nothing, so that nothing of it is kept."""
    told.clear()
    asked = [[{"role": "user", "content": f"Number {i}."}] for i in range(len(kinds))]
    columns = {"kind": list(kinds), "requests": [requests] * len(kinds)}
    e = trainer.generate_experience(prompts_of(trainer, asked, **columns))
    drawn = Counter()
    for number, mask in zip(e.numbers.tolist(), e.answer_mask, strict=True):
        drawn[kinds[number // 2]] += int(mask.sum())
    assert drawn.pop("leaves", 0) >= told.pop("leaves", 0)  # one may come too late for its agent
    assert drawn == told
    with trainer.engine.rollout_mode() as generator:
        assert generator.cache.num_free == generator.cache.num_pages


def settle(trainer):
    """A rollout after a pause in which connections and timers expire: asyncio keeps cancelled
    timers, and what they refer to. Its threads end within a second.
    """
    time.sleep(LIMIT_S + 1)
    roll_out(trainer, KINDS, requests=2)
    time.sleep(1)
    gc.collect()


def left():
    """Counts of what may be left behind: objects by their types, threads, open files."""
    counts = Counter(map(type, gc.get_objects()))
    files = len(os.listdir("/proc/self/fd"))
    return counts | {"threads": threading.active_count(), "files": files}


def num_bytes():
    """Traced and resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return tracemalloc.get_traced_memory()[0], pages * resource.getpagesize()


@pytest.mark.slow
def test_fifty_rollouts_leave_nothing_behind(caplog):
    caplog.set_level(logging.ERROR, "dschat")  # it keeps what is logged
    trainer = trainer_of(agent, num_samples_per_prompt=2, on_agent_error="zero")
    left()  # counting fills caches
    tracemalloc.start()
    try:
        roll_out(trainer, ["talks"] * 50 + ["begins again"] * 50, requests=8)
        trainer.args.agent_timeout_s = LIMIT_S
        for _ in range(9):
            roll_out(trainer, KINDS, requests=2)
        settle(trainer)
        before, bytes_before = left(), num_bytes()
        for _ in range(38):
            roll_out(trainer, KINDS, requests=2)
        settle(trainer)
        bytes_after, after = num_bytes(), left()
    finally:
        tracemalloc.stop()
    more = {name: count - before[name] for name, count in after.items() if count > before[name]}
    traced, resident = (b - a for a, b in zip(bytes_before, bytes_after, strict=True))
    assert {name: count for name, count in more.items() if count >= 38} == {}
    assert traced < 38 * 2**10
    assert resident < 38 * 2**19
