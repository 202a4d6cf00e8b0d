"""Reward functions that fail in every way. Those that fail for one prompt fail for "p2". No torch
here: worker processes import this file.
"""

import asyncio
import os
import signal
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
    time.sleep(0.06 * len(prompts))
    return [1.0] * len(prompts)


def one_number(answers):
    return 1.0


def is_nan(prompts):
    return [float("nan") if prompt == "p2" else 1.0 for prompt in prompts]


def wrong_tokens(prompts):
    return [[1.0] * 9 if prompt == "p2" else 1.0 for prompt in prompts]


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


async def waits_for_ever(prompts):
    if "p2" in prompts:
        await asyncio.sleep(1000)
    return [1.0] * len(prompts)


async def raises_later(prompts):
    await asyncio.sleep(0)
    return raises(prompts)


async def blocks(prompts):
    if "p2" in prompts:
        time.sleep(3)
    return [1.0] * len(prompts)


def wants_more(answers, tests):
    return [1.0] * len(answers)


class Mathematician:
    """In the place of the comparison: some answers hang, some end the process, and 1 is right."""

    def __call__(self, reference, answer):
        if answer == "slow":
            time.sleep(600)
        if answer == "deadly":
            os._exit(7)
        return answer == "1"
