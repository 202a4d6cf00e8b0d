"""Reward functions of the cases that run in two processes."""


def mostly_alike(prompt_ids, answer_ids):
    """Tells answers apart for every other prompt only."""
    both = zip(prompt_ids, answer_ids, strict=True)
    return [float(sum(a) % 2) if sum(p) % 2 else 0.0 for p, a in both]


def by_token(answers, answer_ids):
    """A score for every token; none for one answer in four."""
    rows = zip(answers, answer_ids, strict=True)  # also on a rank without answers
    return [None if sum(ids) % 4 == 0 else [float(i % 3) for i in ids] for _, ids in rows]
