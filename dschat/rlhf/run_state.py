"""Gathers what the next iteration of a run of step 3 depends on, and puts it back."""

from typing import Any

from dschat.checkpoint.manager import RunState
from dschat.data.batches import position_of, seek
from dschat.rlhf.reporter import Reporter
from dschat.rlhf.trainer import DeepSpeedPPOTrainer


class Run:
    """A run between two iterations, where no experience is pending.

    Its state is the trained engines, the moving average, and the values of `state_dict`. What an
    iteration leaves for a later one is named there, and read again in `load_state_dict`. A
    checkpoint that lacks a value, of other settings or an older version, is refused, and the value
    named (`dschat.checkpoint.manager.load`).

    Args:
        report: of the run; None: the learner's state alone.
        num_rows: number of training prompts; None: not known.
    """

    def __init__(
        self,
        trainer: DeepSpeedPPOTrainer,
        report: Reporter | None = None,
        num_rows: int | None = None,
    ) -> None:
        self._trainer, self._report, self._num_rows = trainer, report, num_rows

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able, the same on all ranks."""
        trainer, engine = self._trainer, self._trainer.engine
        values = {
            "iteration": trainer.iteration,
            "version": engine.version,
            "kl_coef": trainer.kl.value,
            "kl_began_at": trainer.args.kl_weight,
            "updates": engine.updates,
            "bad": {name: skipped.in_a_row for name, skipped in trainer.skipped.items()},
            "unsupervised": position_of(trainer.unsupervised),
            "rollouts": trainer.collector.state_dict(),  # and the position in the prompts
            "rows": self._num_rows,
        }
        return values if self._report is None else values | self._report.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; engines and tensors are restored before.

        The KL coefficient is restored only where it is adaptive and ``kl_coef`` is unchanged.
        """
        trainer, engine = self._trainer, self._trainer.engine
        trainer.iteration, engine.version = state["iteration"], state["version"]
        if trainer.kl.target is not None and state["kl_began_at"] == trainer.args.kl_weight:
            trainer.kl.value = state["kl_coef"]
        engine.lay_schedules(state["updates"], is_there=True)
        for name, skipped in trainer.skipped.items():
            skipped.in_a_row = state["bad"][name]
        seek(trainer.unsupervised, state["unsupervised"])
        trainer.collector.load_state_dict(state["rollouts"])
        if self._report is not None:
            self._report.load_state_dict(state)

    def state(self) -> RunState:
        """Collective. The whole state, for a checkpoint."""
        engine = self._trainer.engine
        tensors = {} if engine.ema is None else {"ema": engine.ema.tensors}
        files = [] if self._report is None else self._report.log.files
        return RunState(engine.trained, tensors, self.state_dict(), files=files)
