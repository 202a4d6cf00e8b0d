"""Loads models and tokenizers: causal LMs, score models, chat templates, LoRA."""
