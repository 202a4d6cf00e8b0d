"""Writes a stream of weights as a Hugging Face folder that ``AutoModel*.from_pretrained`` loads.

The folder has sharded safetensors, and is complete or absent. No complete state dict is held.

transformers renames, fuses and splits many families' weights while it loads them. Other programs
know the hub's form only, so a save reverts that. It also adds what training did not load of the
checkpoint that it started from: a vision tower, heads that predict several tokens.
"""

import copy
import json
import logging
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from peft import PeftModel, TaskType
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

import dschat.distributed as dist
from dschat.checkpoint.atomic_files import discard, save_tensors, staging_of
from dschat.checkpoint.manifest import newest
from dschat.checkpoint.saved_check import SavedModelError, check_saved
from dschat.config import UserError
from dschat.distributed.machine import is_full, needed_and_free
from dschat.models.adapter_files import saved_form
from dschat.models.checkpoint_files import CHECKSUMS, CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import FIELD, Rest, whole_name
from dschat.models.config_files import muted
from dschat.models.long_rows import restore_rotary
from dschat.models.lora import unwrapped_name
from dschat.models.training_engine import without_adapters
from dschat.startup.files import sha256_of, sync_file

_LAYER = re.compile(r"^.*?\.\d+\.")


def hub_tensors(
    model: PreTrainedModel, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields ``stream``, the weights of ``model``, in the form of its family's checkpoints.

    Holds a copy of one layer where tensors are fused or split, and of none else.
    """
    rest: Rest = getattr(model, "rest", None) or Rest()
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    fuses = any(isinstance(conversion, WeightConverter) for conversion in conversions)
    for tensors in _by_layer(model, stream) if fuses else ({n: t} for n, t in stream):
        if conversions:
            tensors = revert_weight_conversion(model, tensors)
        for name in list(tensors):
            yield whole_name(name, rest.prefixes), tensors.pop(name)
    if rest.keys:
        files = CheckpointFiles(rest.source, "the base model")
        yield from files.tensors(lambda key: key if key in rest.keys else None)


def _by_layer(
    model: PreTrainedModel, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors of each layer together: what is fused or split is within one."""
    saved = model.state_dict(keep_vars=True).keys()
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers() if name in saved]
    expected: dict[str, set[str]] = defaultdict(set)
    for name in filter(None, map(unwrapped_name, names)):
        expected[_layer(name)].add(name)
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in stream:
        layer = _layer(name)
        waiting[layer][name] = tensor.detach().to("cpu", copy=True)
        del tensor
        if waiting[layer].keys() == expected[layer]:
            yield waiting.pop(layer)
    assert not waiting, f"the stream lacks weights beside {next(iter(waiting))}"


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


MAX_FILE_BYTES = 4 * 2**30
written: dict[Path, list[str]] = {}  # what this process saved, by folder: names in it

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# How others draw answers by default, as the base model's authors chose. Nothing here reads it.
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PROCESSOR_FILES = (  # of models that see and hear
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def export_hf(
    folder: str | Path,
    stream: Iterable[tuple[str, Tensor]],
    model: nn.Module,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...] = (),
    values: Tensor | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Collective. Write ``stream`` to ``folder``: every rank iterates, rank 0 writes.

    Files are written beside ``folder``, checked, and then moved into it.

    Args:
        model: the transformers model that ``stream`` is of, or PEFT's around it.
        stop_ids: the ids that end an answer, for the generation config.
        values: what the model computes, by `probe_values`; the saved one must compute the same.

    Raises:
        UserError: the disk is full.
        SavedModelError: what was written is not the model; it stays beside ``folder``.
    """
    folder = Path(folder)
    base = without_adapters(model)
    staging = staging_of(folder)
    main = dist.is_main_process()
    if main:
        discard(staging)
        staging.mkdir(parents=True)
    files: list[dict[str, int]] = []
    try:
        if main:
            stream = hub_tensors(base, stream)
        dtype = _write_weights(_batches(stream, max_file_bytes, main), staging, files)
        if main:
            _write_index(staging, files)
            _write_hub_files(staging, base, config, tokenizer, stop_ids, dtype)
            check_saved(staging, base, values)
            _write_checksums(staging)
            _move_in(staging, folder)
    except SavedModelError:
        raise
    except BaseException as error:  # Ctrl-C or a full disk: no partial model is left
        if main:
            shutil.rmtree(staging, ignore_errors=True)
        if is_full(error):
            raise _no_space(folder, sum(sum(sizes.values()) for sizes in files)) from None
        raise
    dist.barrier()


def _no_space(folder: Path, num_bytes: int) -> UserError:
    """The error for a full disk; it names the checkpoint that the run can resume from."""
    checkpoint = next(filter(None, map(newest, (folder, *folder.parents[:2]))), None)
    remedy = "train again"
    if checkpoint:
        remedy = f"resume from {checkpoint.folder} (--resume; train.py: the same command)"
    return UserError(
        f"{folder} has no space for the model: {needed_and_free(num_bytes, folder)}; free some, "
        f"then {remedy}"
    )


def _write_weights(
    batches: Iterable[dict[str, Tensor]], staging: Path, files: list[dict[str, int]]
) -> torch.dtype | None:
    """Write each of ``batches`` to a file; returns the dtype of the weights.

    Appends the byte size of each tensor to ``files``, per file. On a full disk it still iterates to
    the end: the other ranks do, and the size of the model is known then.
    """
    dtype: torch.dtype | None = None
    full: Exception | None = None
    for tensors in batches:
        floating = (t.dtype for t in tensors.values() if t.is_floating_point())
        dtype = dtype or next(floating, None)
        files.append({name: t.nbytes for name, t in tensors.items()})
        try:
            if full is None:
                path = staging / f"part-{len(files):05d}.safetensors"
                save_tensors(tensors, path)
        except Exception as error:
            if not is_full(error):
                raise
            full = error
        tensors.clear()  # before the tensors of the next file are collected
    if full is not None:
        raise full
    return dtype


def _batches(
    stream: Iterable[tuple[str, Tensor]], max_file_bytes: int, main: bool
) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors of each file on rank 0; other ranks only iterate."""
    waiting, used = dict[str, Tensor](), 0
    for name, tensor in stream:
        if not main:
            continue
        if waiting and used + tensor.nbytes > max_file_bytes:
            yield waiting
            waiting, used = {}, 0
        used += tensor.nbytes
        # NOTE: the stream reuses its buffers, so pending tensors are copied.
        waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        del tensor  # NOTE: it may keep a whole bucket alive while the next one is gathered
    if waiting:
        yield waiting


def _write_index(staging: Path, files: list[dict[str, int]]) -> None:
    if len(files) == 1:
        (staging / "part-00001.safetensors").rename(staging / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (staging / f"part-{number:05d}.safetensors").rename(staging / name)
        weight_map |= dict.fromkeys(sizes, name)
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)},
        "weight_map": weight_map,
    }
    (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_hub_files(
    staging: Path,
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    dtype: torch.dtype | None,
) -> None:
    saved = type(config).from_dict(config.to_dict())
    restore_rotary(saved)
    saved.architectures = [type(model).__name__]
    saved.use_cache = True
    ends = saved.eos_token_id if isinstance(saved.eos_token_id, list) else [saved.eos_token_id]
    if tokenizer.eos_token_id not in ends:  # --eot_token, or another --tokenizer_name_or_path
        saved.eos_token_id = tokenizer.eos_token_id
    saved.dtype = dtype  # from_pretrained loads in it; the base's dtype may differ
    if getattr(model, "_auto_class", None) is not None:  # the checkpoint's own Python code
        custom_object_save(model, staging, config=saved)
    saved.save_pretrained(staging)
    _restore_whole(staging, model, saved)
    tokenizer.save_pretrained(staging)
    if stop_ids:
        eos = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos}
        ids |= {"pad_token_id": tokenizer.pad_token_id}
        source = getattr(model, "generation_config", None)
        found = {name: getattr(source, name, None) for name in _SAMPLING}
        sampling = {name: value for name, value in found.items() if value is not None}
        with muted(logging.WARNING):
            try:
                GenerationConfig(**sampling, **ids).save_pretrained(staging)
            except (TypeError, ValueError):  # invalid: a temperature without do_sample
                GenerationConfig(**ids).save_pretrained(staging)


def _restore_whole(staging: Path, model: PreTrainedModel, saved: PretrainedConfig) -> None:
    """Put the saved text model's configuration into the whole model's."""
    rest: Rest = getattr(model, "rest", None) or Rest()
    raw = CheckpointFiles(rest.source, "the base model").json(CONFIG) if rest.source else None
    if raw is None or FIELD not in raw or hasattr(saved, FIELD):
        return
    text = json.loads((staging / CONFIG).read_text("utf-8"))
    names = ("vocab_size", "dtype", "tie_word_embeddings", *_SPECIAL_IDS)
    trained = {name: text[name] for name in names if name in text}
    raw |= {name: value for name, value in trained.items() if name in raw}
    raw[FIELD] = {**raw[FIELD], **trained}
    (staging / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", "utf-8")
    for name in _PROCESSOR_FILES:
        if file := cached_file(rest.source, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(file, staging / name)


def _write_checksums(staging: Path) -> None:
    """Write what ``sha256sum --check`` reads; `Checkpoint.check` does where that is cheap."""
    files = sorted(staging.glob("*.safetensors"))
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in files]
    (staging / CHECKSUMS).write_text("".join(lines))


def _move_in(staging: Path, folder: Path) -> None:
    """Move the finished files into ``folder``, which may hold metrics; weights go last."""
    folder.mkdir(parents=True, exist_ok=True)
    written[folder] = sorted(path.name for path in staging.iterdir())
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for path in sorted(staging.iterdir(), key=lambda p: p.suffix == ".safetensors"):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        sync_file(path)
        os.replace(path, target)
    sync_file(folder)
    staging.rmdir()


def export_adapter(
    folder: str | Path, stream: Iterable[tuple[str, Tensor]], wrapped: PeftModel
) -> None:
    """Collective. Write a LoRA adapter in PEFT's format; ``stream`` has adapter weights only."""
    state = {}
    for name, tensor in stream:
        if dist.is_main_process():
            state[name.replace(".default.", ".")] = (
                tensor.detach().to("cpu", copy=True).contiguous()
            )
    if dist.is_main_process():
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = copy.copy(wrapped.peft_config["default"])
        is_score = hasattr(wrapped.get_base_model(), "score")
        settings.task_type = TaskType.SEQ_CLS if is_score else TaskType.CAUSAL_LM
        state = saved_form(wrapped, state, settings)
        try:
            with tempfile.TemporaryDirectory(prefix=".adapter-", dir=folder) as staging:
                save_tensors(state, Path(staging, "adapter_model.safetensors"))
                settings.save_pretrained(staging)
                _move_in(Path(staging), folder)
        except Exception as error:
            if is_full(error):
                raise _no_space(folder, sum(t.nbytes for t in state.values())) from None
            raise
    dist.barrier()
