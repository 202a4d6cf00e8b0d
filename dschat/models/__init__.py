"""Loading tokenizers, actors and reward models; LoRA; the Hugging Face generator."""
