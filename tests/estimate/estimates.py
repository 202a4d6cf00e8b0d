"""Estimates a step on a GPU of a given size, for the tests beside it."""

from dschat.estimate import Request
from dschat.estimate.run import make_estimator


def estimated(fields: dict, number: int = 3, num_processes: int = 1, gib: float = 80.0):
    """The estimate of one step on a GPU of ``gib``, and the function that made it."""
    request = Request({number: fields}, num_processes, num_processes, gib)
    make = make_estimator(request)
    return make(request.config(number)), make


def pairs_estimate(tiny, **knobs):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32, "loss": "dpo"}
    return estimated(fields | knobs, number=2)
