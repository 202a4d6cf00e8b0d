"""The engine's decoder: roles of weights, their storage, attention, KV cache, rotary tables."""
