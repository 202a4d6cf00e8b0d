"""Renders a run's metrics as one HTML page."""
