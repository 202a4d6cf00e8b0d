"""The engine's decoder: architecture table, weights, attention, KV cache, rotary tables."""
