"""Rewards that are programs: Python functions and an HTTP endpoint that score answers.

    samples       -                        -> what a program sees: prompts, answers, rows' columns
    load          --reward_fn, a callable  -> a named, weighted function with its arguments
    modules       a file, a name           -> the module, imported within a time limit
    call          a function and samples   -> one value a sample, or what went wrong, in one line
    attempt       the same                 -> values, and the prompt that it went wrong on
    worker        the same                 -> the same, by a process that can be killed
    pool          calls                    -> their results later, each within its time limit
    endpoint      --reward_url             -> values of samples, by requests that are repeated
    ready         -                        -> the ready-made functions
    math_answers  two answers              -> whether they are equal as mathematics
    programs      a config and callables   -> `RewardPrograms`: start on samples, finish with scores
    total         scores by source         -> their weighted sum, each scaled if asked to

Nothing here knows models, tokenizers or training. Errors of a user's function become `RewardError`,
the same on every rank.
"""
