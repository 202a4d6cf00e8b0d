"""Has reward functions score prompts whose answers are complete while others are still generated.

For sources that take parts of a rollout: an endpoint, and functions in a pool of several workers.
What makes up a call depends on the order in which prompts complete, never on a clock. A call has
as many samples as half a worker's share of those that are left: calls are large at first, and the
last ones small, so that little is left to score after the last answer (guided self-scheduling,
Polychronopoulos and Kuck 1987).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from dschat.inference.protocol import Rollout
from dschat.rewards.reward_functions import Begun, Pending, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rlhf.prompt_table import PromptTable


class EarlyScoring:
    """Scores the answers to ``num_prompts`` of ``prompts``, each in a call of its own or with
    others.

    ``samples_of``: of answers, and the prompt of each.
    """

    def __init__(
        self,
        functions: RewardFunctions,
        timeout_s: float,
        samples_of: Callable[[PromptTable, Rollout], Samples],
        prompts: PromptTable,
        num_prompts: int,
    ) -> None:
        self._functions, self._timeout_s, self._samples_of = functions, timeout_s, samples_of
        self._prompts, self._num_left = prompts, num_prompts
        # Functions tell the answers to two prompts apart by their ids: equal ones wait for the end.
        self._uses = Counter(map(tuple, prompts.ids))
        self._known: dict[int, Samples] = {}
        self._waiting: list[int] = []
        self._begun: list[Begun] = []

    def add(self, row: int, answers: Rollout, own: PromptTable | None = None) -> None:
        """Take all answers to prompt ``row``, which will be part of the rollout.

        ``own``: the prompt of each answer, where an environment added to it.
        """
        if self._uses[tuple(self._prompts.ids[row])] > 1:
            return
        own = self._prompts.pick([row]).repeated(len(answers)) if own is None else own
        self._known[row] = self._samples_of(own, answers)
        self._waiting.append(row)
        if 2 * self._functions.num_workers * len(self._waiting) >= self._num_left:
            rows = sorted(self._waiting)
            samples = Samples.joined([self._known[row] for row in rows])
            self._begun.append((rows, self._functions.score_part(samples, self._timeout_s)))
            self._num_left -= len(rows)
            self._waiting = []

    def finish(self, rows: Sequence[int], rollout: Rollout, prompts: PromptTable) -> Pending:
        """Start scoring what is left. ``rows``: the prompts of ``rollout``; ``prompts``: that of
        each answer.
        """
        n = len(rollout) // max(len(rows), 1)
        groups, places = [], {}
        for place, row in enumerate(rows):
            answers = range(place * n, (place + 1) * n)
            if row not in self._known:
                part = rollout.part(answers.start, answers.stop)
                self._known[row] = self._samples_of(prompts.pick([*answers]), part)
            groups.append(self._known[row])
            places[row] = answers
        begun = [
            ([sample for row in part for sample in places[row]], calls)
            for part, calls in self._begun
        ]
        return self._functions.score(Samples.joined(groups), self._timeout_s, begun)
