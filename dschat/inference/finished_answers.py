"""Gathers the finished sequences of a call, and reports each prompt that is complete."""

from collections.abc import Iterable

from dschat.inference.protocol import Answered, Rollout
from dschat.inference.sequence import Prompt, Sequence


class FinishedAnswers:
    """Finished sequences by prompt.

    Args:
        prompts: of this rank, in their order; there may be sequences of others.
        answered: called for each of them when all its sequences are finished.
    """

    def __init__(self, prompts: Iterable[Prompt], answered: Answered | None) -> None:
        self._rows = {prompt: row for row, prompt in enumerate(prompts)}
        self._answered = answered
        self._done: dict[Prompt, dict[int, Sequence]] = {}  # by sample
        self.sequences: list[Sequence] = []  # in the order in which they finished

    def add(self, sequence: Sequence) -> None:
        prompt = sequence.prompt
        self.sequences.append(sequence)
        samples = self._done.setdefault(prompt, {})
        samples[sequence.sample] = sequence
        is_complete = len(samples) == prompt.num_samples
        if is_complete and self._answered is not None and prompt in self._rows:
            self._answered(self._rows[prompt], self._answers(prompt))

    def rollout(self) -> Rollout:
        """The answers to this rank's prompts, all of which are complete."""
        return Rollout.joined(map(self._answers, self._rows))

    def _answers(self, prompt: Prompt) -> Rollout:
        samples = self._done[prompt]
        return rollout_of_sequences([samples[i] for i in range(prompt.num_samples)])


def rollout_of_sequences(sequences: Iterable[Sequence]) -> Rollout:
    """The answers of finished ``sequences``."""
    rollout = Rollout()
    for sequence in sequences:
        rollout.token_ids.append(sequence.answer)
        rollout.logprobs.append(sequence.logprobs)
        rollout.finish_reasons.append("stop" if sequence.stopped else "length")
    return rollout
