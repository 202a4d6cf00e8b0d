"""The decoder that the engine runs: weights, attention, key-value cache, rotary tables."""
