"""Batch generation and evaluation over local files."""
