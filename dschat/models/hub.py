"""Turns the Hugging Face hub off if it cannot be reached.

Its client repeats every request five times. That takes half a minute for each file of a model, even
if the model was downloaded before.
"""

import logging
import os
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

logger = logging.getLogger("dschat")


def prepare(name_or_path: str) -> None:
    """Call before ``name_or_path`` is looked up: turns the hub off if it cannot be reached."""
    if not os.path.exists(name_or_path) and not constants.HF_HUB_OFFLINE and not has_network():
        constants.HF_HUB_OFFLINE = True
        logger.warning("%s cannot be reached: only downloaded models are found", _host())


def missing() -> str:
    """Why a model was not found."""
    reason = ": no such folder, and no such model on the hub; check the name"
    if constants.HF_HUB_OFFLINE:
        reason += " (only downloaded models are found: no network, or HF_HUB_OFFLINE)"
    return reason


def _host() -> str:
    return urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT


@cache
def has_network() -> bool:
    """False where the hub's name has no address. A proxy knows addresses that are unknown here.
    Asked once.
    """
    if {"https", "http", "all"} & {*getproxies()}:
        return True
    try:
        return bool(socket.getaddrinfo(_host(), 443))
    except OSError:
        return False
