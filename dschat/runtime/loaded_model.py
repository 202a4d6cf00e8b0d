"""A model that Python code has loaded: written to a folder that a run starts from, and filled with
the weights that it has trained.
"""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dschat.runtime.deepspeed_engine  # noqa: F401  sets DeepSpeed's accelerator
from dschat.checkpoint.manifest import COMPLETE, newest
from dschat.config import CommonConfig, RewardConfig, SFTConfig, UserError
from dschat.distributed import world_size
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.tokenizer import embedding_rows, read_tokenizer
from dschat.runtime.output_dir import check_writable
from dschat.startup.files import discard


class LoadedModel:
    """A ``model`` for a run with ``config``, which reads it in ``folder``.

    ``tokenizer``: None: the one of the folder or hub name that the model was loaded from. Raises
    ``UserError`` for a model that cannot be saved and filled here, or no tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any, config: CommonConfig) -> None:
        self._is_score = isinstance(config, RewardConfig) and not config.trains_policy
        if problem := _problem(model, self._is_score):
            raise UserError(f"model is a {type(model).__name__}{problem}")
        origin = CheckpointFiles(model.name_or_path, "give processing_class;")
        self._model, self._tokenizer = model, tokenizer or read_tokenizer(origin)
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            raise UserError(f"processing_class is a {type(tokenizer).__name__}, not a tokenizer")
        self._out = os.path.abspath(config.output_dir or config.default_output_dir)
        self.folder = os.path.join(self._out, "initial_model")

    def write(self, config: CommonConfig) -> None:
        """Write them, unless the output folder holds a run: it resumes, or is refused."""
        check_writable(Path(self._out))
        has_run = newest(self._out) or os.path.exists(os.path.join(self._out, COMPLETE))
        if config.overwrite_output_dir or not (has_run and os.path.isdir(self.folder)):
            discard(Path(self.folder))
            self._model.save_pretrained(self.folder)
            self._tokenizer.save_pretrained(self.folder)

    def fill(self, config: CommonConfig) -> None:
        """Copy the trained weights into the model, on its device, in its precision."""
        is_in_root = self._is_score or isinstance(config, SFTConfig)
        folder = os.path.join(self._out, "" if is_in_root else "actor")
        trained = type(self._model).from_pretrained(folder, dtype=self._model.dtype)
        self._model.resize_token_embeddings(embedding_rows(trained.config))
        self._model.load_state_dict(trained.state_dict())
        self._model.generation_config = trained.generation_config  # its answers end as trained


def _problem(model: Any, is_score: bool) -> str:
    """Why no run can start from ``model``, behind its type; empty if one can."""
    if hasattr(model, "peft_config"):
        return " with adapters; give model.merge_and_unload(), and a LoRA rank for new ones"
    if not isinstance(model, PreTrainedModel):
        return "; give a folder, a hub name or a loaded model of transformers"
    if getattr(model, "is_quantized", False):
        return " with quantized weights; name it, and quantize with load_in_4bit or load_in_8bit"
    if any(parameter.is_meta for parameter in model.parameters()):
        return " with offloaded weights; give its folder or hub name"
    if world_size() > 1:
        return f", and each of {world_size()} processes has one; give its folder or hub name"
    is_reward = type(model).__name__.endswith("ForSequenceClassification")
    if is_score and not (is_reward and model.config.num_labels == 1):
        return "; load AutoModelForSequenceClassification with num_labels=1, or name the model"
    return "" if is_score or model.can_generate() else "; give a causal LM"
