"""Loads models and tokenizers: causal LMs, score models, chat templates, LoRA."""

import logging

# On some CPUs bitsandbytes, which peft imports, misses a kernel of the hub that is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
