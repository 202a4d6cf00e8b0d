"""What a run reports: console, metrics files, FLOPs."""
