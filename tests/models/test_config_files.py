"""A limit of the machine is not told as a damaged file."""

import errno
import json
import os
from unittest.mock import Mock

import pytest
from transformers import AutoConfig

from dschat.config import UserError
from dschat.models import checkpoint_files
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.config_files import read_config, read_generation_config

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
