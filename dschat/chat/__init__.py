"""Talking to a trained model."""
