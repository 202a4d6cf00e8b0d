"""Counts tokens, seconds and cache use of one call of `generate`."""

from dataclasses import dataclass

from dschat.inference.scheduler import StepSchedule


@dataclass
class GenerationStats:
    """Statistics of one call of `generate`, over all prompts of the tensor-parallel group.

    A step with prompt tokens counts as prefill, including the sequences that decode in it; any
    other step counts as decode.
    """

    prompts: int = 0
    prefill_tokens: int = 0
    prefill_steps: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    answer_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    max_num_seqs: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def occupancy(self) -> float:
        """Mean share of ``max_num_seqs`` that decoded in a decode step."""
        slots = self.decode_steps * self.max_num_seqs
        return self.decode_tokens / slots if slots else 0.0

    @property
    def cache_use(self) -> float:
        """Peak share of the pages in use."""
        return self.peak_pages / self.num_pages if self.num_pages else 0.0

    def count(self, schedule: StepSchedule, num_drawn: int, seconds: float) -> None:
        """Add a step that drew ``num_drawn`` tokens."""
        self.answer_tokens += num_drawn
        # The last token of a prompt may be among the decoding rows.
        self.prefill_tokens += sum(not s.answer for s in schedule.decodes)
        if schedule.chunks:
            self.prefill_tokens += sum(count for _, count in schedule.chunks)
            self.prefill_steps += 1
            self.prefill_s += seconds
        else:
            self.decode_tokens += num_drawn
            self.decode_steps += 1
            self.decode_s += seconds
