"""Reports a run: console, metrics.jsonl and other sinks, FLOPs."""
