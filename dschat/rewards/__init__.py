"""Scores answers with Python functions.

    loader            makes --reward_fn and callables into named, weighted functions
    function          `RewardFunction`: its name, weight and arguments; its calls and their retries
    call              a function's samples, and its call: one value per sample, or a one-line fault
    endpoint          the ready-made function http: posts samples to an endpoint, with retries
    library           the ready-made functions: exact_match, math_equal, ...
    judge             ready-made functions that ask a language model
    math_answers      compares two answers as mathematics
    reward_functions  `RewardFunctions`: the functions of a run, where they run, and their state
    scoring           `Scoring`: the answers of a rollout being scored by all functions;
                      `SourceScores`, and their weighted sum, each normalized on request

No models, tokenizers or training here. Errors of a user's function become `RewardError`, the same
on every rank.
"""
