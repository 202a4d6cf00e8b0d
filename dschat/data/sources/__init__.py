"""From files and hub names to examples: readers, adapters, splits, streams."""
