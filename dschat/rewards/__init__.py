"""Scores answers with Python functions and an HTTP endpoint: `RewardFunctions` has the sources of a
run, `Scoring` the answers of a rollout.

No models, tokenizers or training here. Errors of a user's function become `RewardError`, the same
on every rank.
"""
