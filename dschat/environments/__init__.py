"""Environments: what answers the model between its turns, and rewards it."""
