"""Renders a run's metrics as one HTML page and as figures."""
