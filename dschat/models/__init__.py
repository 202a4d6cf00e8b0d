"""Loading tokenizers, actors and reward models; LoRA; the Hugging Face generator."""

from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()  # one bar per file drowns the log; ours says what loads
