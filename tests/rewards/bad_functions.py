"""Reward functions that fail in every way. Those that fail for one prompt fail for "p2"."""

import asyncio
import os
import signal
import subprocess
import time


def raises(prompts):
    for prompt in prompts:
        if prompt == "p2":
            raise KeyError("no such\nkey")
    return [1.0] * len(prompts)


def raises_what_cannot_be_shown(prompts):
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    raise Silent


def raises_a_novel(prompts):
    raise ValueError("word " * 10_000)


def hangs(prompts):
    if "p2" in prompts:
        time.sleep(1000)
    return [1.0] * len(prompts)


def is_slow(prompts):
    time.sleep(0.15 * len(prompts))
    return [1.0] * len(prompts)


def one_too_few(answers):
    return [1.0] * (len(answers) - 1)


def one_number(answers):
    return 1.0


def nothing(answers):
    pass


def lazily(answers):
    return (1.0 for _ in answers)


def by_name(prompts):
    return dict.fromkeys(prompts, 1.0)


def is_nan(prompts):
    return [float("nan") if prompt == "p2" else 1.0 for prompt in prompts]


def is_infinite(prompts):
    return [float("inf") if prompt == "p2" else 1.0 for prompt in prompts]


def beyond_floats(prompts):
    return [1e300 if prompt == "p2" else 1.0 for prompt in prompts]


def is_text(prompts):
    return ["0.5" if prompt == "p2" else 1.0 for prompt in prompts]


def wrong_tokens(prompts):
    return [[1.0] * 9 if prompt == "p2" else 1.0 for prompt in prompts]


def nan_token(prompts, answer_ids):
    return [[float("nan")] * len(ids) for ids in answer_ids]


def forgets_await(prompts):
    async def scores():
        return [1.0] * len(prompts)

    return scores()


def exits(prompts):
    if "p2" in prompts:
        raise SystemExit(3)
    return [1.0] * len(prompts)


def only_alone(prompts):
    if len(prompts) > 1:
        raise RuntimeError("too many")
    return [1.0]


def recursive(prompts):
    return recursive(prompts)


def with_signals(prompts):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return [1.0] * len(prompts)


def dies(prompts):
    if "p2" in prompts:
        os._exit(7)
    return [1.0] * len(prompts)


def is_killed(prompts):
    if "p2" in prompts:
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(prompts)


def keeps_the_interpreter(prompts):
    """Computes in C with the GIL held: no other thread runs, no signal is handled."""
    if "p2" in prompts:
        return [9 ** (9**9)]
    return [1.0] * len(prompts)


async def waits_for_ever(prompts):
    if "p2" in prompts:
        await asyncio.sleep(1000)
    return [1.0] * len(prompts)


async def raises_later(prompts):
    await asyncio.sleep(0)
    raises(prompts)
    return [1.0] * len(prompts)


async def blocks(prompts):
    if "p2" in prompts:
        time.sleep(3)
    return [1.0] * len(prompts)


def wants_more(answers, tests):
    return [1.0] * len(answers)


def starts_another(path, how):
    """Starts a long-running process, then hangs, dies or returns."""
    process = subprocess.Popen(["sleep", "600"])
    with open(path, "w") as file:
        file.write(f"{process.pid}\n")
    if how == "hangs":
        time.sleep(600)
    if how == "dies":
        os._exit(7)
    return [1.0]
