"""What is wrong in a config is one line; a limit of the machine is not told as a damaged file."""

import errno
import json
import logging
import os
import re
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from dschat.config import UserError
from dschat.models import checkpoint_files
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.config_files import muted, read_config, read_generation_config

SHORTAGES = (
    MemoryError(),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
)


@pytest.mark.parametrize("shortage", SHORTAGES, ids=repr)
def test_what_cannot_be_had_is_not_blamed_on_the_config(shortage, tiny, monkeypatch):
    files = CheckpointFiles(tiny("llama"), "--model")
    raw = files.json("config.json")
    monkeypatch.setattr(AutoConfig, "from_pretrained", Mock(side_effect=shortage))
    with pytest.raises(type(shortage)) as raised:
        read_config(files, raw)
    assert raised.value is shortage


@pytest.mark.parametrize("shortage", [s for s in SHORTAGES if isinstance(s, OSError)], ids=repr)
@pytest.mark.parametrize("name", ["cached_file", "json"])
def test_nor_on_the_checkpoint(shortage, name, tiny, monkeypatch):
    fails = Mock(side_effect=shortage)
    fake = Mock(loads=fails) if name == "json" else fails
    monkeypatch.setattr(checkpoint_files, name, fake)
    with pytest.raises(type(shortage)) as raised:
        read_generation_config(CheckpointFiles(tiny("llama"), "--model"))
    assert raised.value is shortage


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), OSError(errno.EACCES, "x")])
def test_other_errors_are(error, tiny, monkeypatch):
    files = CheckpointFiles(tiny("llama"), "--model")
    raw = json.loads(json.dumps(files.json("config.json")))
    monkeypatch.setattr(AutoConfig, "from_pretrained", Mock(side_effect=error))
    with pytest.raises(UserError, match="its config.json cannot be used"):
        read_config(files, raw)


def load(folder):
    checkpoint = Checkpoint(folder, "--model")
    checkpoint.check("lm", None, 0, [])
    return checkpoint.language_model(torch.float32)


@pytest.mark.parametrize(
    ("family", "field", "value", "words"),
    [
        ("llama", "architectures", "Llama", 'architectures is "Llama" (not a list of class names)'),
        ("llama", "architectures", [1], "architectures is [1] (not a list of class names)"),
        ("llama", "model_type", None, "model_type is null (not the name of an architecture)"),
        # transformers' own words, and those of the weights
        ("llama", "hidden_size", "32", "Field 'hidden_size' expected int, got str"),
        ("llama", "rms_norm_eps", None, "Field 'rms_norm_eps' expected float, got NoneType"),
        ("llama", "num_attention_heads", 3, "hidden size (32) is not a multiple of the number"),
        ("llama", "num_key_value_heads", 3, "has other shapes than its config.json asks for"),
        ("llama", "vocab_size", 0, "has other shapes than its config.json asks for"),
    ],
)
def test_a_wrong_field_is_one_line(family, field, value, words, tiny, tmp_path):
    folder = Path(shutil.copytree(tiny(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        load(str(folder))
    assert str(raised.value).startswith("--model ")
    assert len(str(raised.value).splitlines()) == 1


def test_muted_contexts_of_two_threads_leave_nothing_muted():
    """The second begins while the first is open, and ends after it."""
    before = list(warnings.filters)
    first, second = muted(logging.WARNING), muted(logging.ERROR)
    first.__enter__()
    second.__enter__()
    assert logging.root.manager.disable == logging.ERROR
    first.__exit__(None, None, None)
    assert logging.root.manager.disable == logging.ERROR
    second.__exit__(None, None, None)
    assert logging.root.manager.disable == logging.NOTSET
    assert warnings.filters == before
    with muted(logging.WARNING):
        with muted(logging.ERROR):
            pass
        assert logging.root.manager.disable == logging.WARNING
