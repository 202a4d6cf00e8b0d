"""Cuts tokenized examples to a maximum length: the prompt at its start, then the answer's end."""

from typing import Optional

from dschat.data.segments import Encoded

_PROMPT_SHARE = 1 / 4  # of max_seq_len that a prompt keeps, however long its answer
CUT_PROMPT, CUT_ANSWER = "lost the beginning of the prompt", "lost the end of the answer"


def prompt_share(max_len: int) -> int:
    """Tokens that a prompt keeps, if it has as many."""
    return max(int(max_len * _PROMPT_SHARE), 1)


def fit(
    encoded: Encoded, num_answers: int, max_len: int, bos: Optional[int]
) -> tuple[list[int], list[float | None], list[list[int]], str]:
    """Cut an example to ``max_len``: (prompt ids, their weights, answers, parts that were lost).

    The prompt keeps its last ``_PROMPT_SHARE`` of ``max_len``, or all of it if it is shorter:
    answers without their question teach nothing. At least one token stays, since the answer's first
    token needs one before it.
    """
    prompt, weights = encoded.prompt_ids, encoded.prompt_weights
    if encoded.problem:
        return [], [], [[]] * num_answers, ""
    share = prompt_share(max_len)
    keep = min(len(prompt), max(max_len - max(map(len, encoded.answers)), share))
    lost = [encoded.cut] if encoded.cut else []
    if keep < len(prompt):
        lost.append(CUT_PROMPT)
        # keep the BOS: the model has always seen one first
        head = 1 if prompt[0] == bos and keep > 1 else 0
        tail = len(prompt) - (keep - head)
        prompt, weights = prompt[:head] + prompt[tail:], weights[:head] + weights[tail:]
    if any(keep + len(answer) > max_len for answer in encoded.answers):
        lost.append(CUT_ANSWER)
    answers = [answer[: max_len - keep] for answer in encoded.answers]
    return prompt, weights, answers, "; ".join(lost)
