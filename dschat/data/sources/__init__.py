"""From files and hub names to ``Example`` rows: readers, adapters, splits."""
