"""Scores answers with Python functions and an HTTP endpoint.

    samples           the input of a reward function: prompts, answers, columns of their rows
    loader            makes --reward_fn and callables into named, weighted functions
    call              calls a function on samples: one value per sample, or a one-line fault
    endpoint          the source that posts samples to --reward_url, with retries
    library           the ready-made functions: exact_match, math_equal, ...
    judge             those that ask a language model; verdict_cache keeps what it said
    math_answers      compares two answers as mathematics
    reward_functions  `RewardFunctions`: the sources of a run, and their state
    scoring           `Scoring`: the answers of a rollout being scored by all sources
    combine           the weighted sum of all sources, each normalized on request

No models, tokenizers or training here. Errors of a user's function become `RewardError`, the same
on every rank.
"""
