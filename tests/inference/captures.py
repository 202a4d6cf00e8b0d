"""Stand-ins for CUDA in tests of captured decode steps: how a step is recorded and when it runs."""

from collections import deque
from functools import partial

from families import empty_engine, on_stacks, stream

from dschat.inference.model.states import StatePool
from dschat.inference.requests import cuda_graphs, step_runner
from dschat.inference.requests.captured_core import CapturedCore
from dschat.inference.requests.cuda_graphs import DecodeGraphs
from dschat.inference.requests.decode_state import DecodeState
from dschat.inference.requests.step_runner import StepRunner


def again(step):
    """Records nothing: a replay runs the step's code again."""
    return step


class LateQueue:
    """Does work as late as a device may: when the host waits for it."""

    def __init__(self):
        self._work, self._done, self.longest = deque(), 0, 0

    def put(self, work):
        self._work.append(work)
        self.longest = max(self.longest, len(self._work))

    def mark(self):
        return partial(self._run, self._done + len(self._work))

    def _run(self, end):
        while self._done < end:
            self._work.popleft()()
            self._done += 1


def _in_order(queue, method):
    """What is computed at once follows what was queued."""

    def wrapper(*args):
        queue.mark()()
        return method(*args)

    return wrapper


def use(monkeypatch, lag=1, queue=None, fewest_tokens=256):
    """Engines of `on_graphs` read ``lag`` steps late; ``queue``: instead of the device's.
    ``fewest_tokens``: pages that the shortest rows read; short answers outgrow few.
    """
    at_once = (StepRunner, "logits"), (StatePool, "own"), (DecodeState, "asleep")
    for owner, name in at_once if queue is not None else ():
        monkeypatch.setattr(owner, name, _in_order(queue, getattr(owner, name)))
    monkeypatch.setattr(step_runner, "DecodeGraphs", partial(DecodeGraphs, queue=queue))
    monkeypatch.setattr(cuda_graphs, "_FEWEST_TOKENS", fewest_tokens)
    monkeypatch.setattr(CapturedCore, "lag", lag)


def captured_by(made, capture, kernels=None):
    """Let an engine decode as on CUDA: ``capture`` records its steps, which may use ``kernels``."""
    made._capture, made._runner = capture, None
    made._kernels = kernels or made._kernels
    return made


def on_graphs(module, capture=again, **knobs):
    """An engine that decodes as on CUDA; ``capture`` records its steps."""
    made = empty_engine(module.config, **knobs)
    if made.spec.experts is not None:
        on_stacks(made)
    made.weights.load(stream(module))
    return captured_by(made, capture)


def graphs_of(made):
    """The decode steps of such an engine."""
    return made.step_runner().graphs(made.num_tokens)


def steps_of(made):
    """Rows, pages and kind of sampling of each step that was captured."""
    return list(graphs_of(made)._graphs)


def noted(monkeypatch, owner, name):
    """The arguments of each later call of a method, which does what it did."""
    calls, method = [], getattr(owner, name)

    def wrapper(*args, **options):
        calls.append(args)
        return method(*args, **options)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def assert_idle(made):
    assert made.cache.num_free == made.cache.num_pages
