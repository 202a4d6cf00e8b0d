"""A row's numbers depend on the row alone: beside longer rows, packed, padded and decoded."""

import pytest
import torch
from own_forward import build
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

