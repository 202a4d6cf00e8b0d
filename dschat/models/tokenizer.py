"""Loading a tokenizer; which ids mean padding and end; its chat template.

A model name comes in, a Hugging Face tokenizer goes out, complete: what is saved with a model tells
others all that training used. It must not know models or data.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.text_file import read_text
from dschat.models.chat_template import default_template, failure
from dschat.models.config_files import culprit, read_json
from dschat.models.model_kind import brings_code

PAD_TOKEN = "<|pad|>"


def load_tokenizer(
    name_or_path: str,
    flag: str,
    trust_remote_code: bool = False,
    eot_token: str | None = None,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, with an EOS, a pad token and a chat template.

    ``eot_token``: what ends an answer in place of its EOS; added where it is no token yet.
    ``chat_template``: a file with one, in place of its own. ``flag`` is named in the ``UserError``
    where there is no tokenizer.
    """
    tokenizer = read_tokenizer(name_or_path, flag, trust_remote_code)
    if eot_token is not None and eot_token != tokenizer.eos_token:
        # Everything that asks where an answer ends asks for EOS; a template may spell the old one.
        former, template = tokenizer.eos_token, tokenizer.chat_template
        tokenizer.add_special_tokens({"eos_token": eot_token})
        if former and isinstance(template, str):
            tokenizer.chat_template = template.replace(former, eot_token)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{flag} {name_or_path}: its tokenizer has no EOS token; set tokenizer.eos_token, or "
            "add one with --add_eot_token"
        )
    if tokenizer.pad_token_id is None:
        # Masks come from lengths, so any id will do to fill a batch with.
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template, tokenizer)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    return tokenizer


def read_tokenizer(
    name_or_path: str, flag: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer as it is: it may lack EOS, pad token and chat template.

    Raises:
        UserError: naming ``flag``: there is none, or it needs code that may not be run.
    """
    home = _home(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(home, trust_remote_code=trust_remote_code)
    # What it raises is whatever came up, a bare Exception of the Rust library included.
    except Exception as error:
        if not trust_remote_code and brings_code(name_or_path, "tokenizer_config.json"):
            reason = (
                "its tokenizer brings its own Python code, which is not run unless you ask for it: "
                "read it, and pass --trust_remote_code if you trust it"
            )
        elif home != name_or_path:
            reason = (
                f"only a vocabulary is there, as DeepSpeed-Chat saved it, and the tokenizer it is "
                f"from ({home}) cannot be had; copy that one's tokenizer files into the folder"
            )
        elif any(Path(name_or_path).glob("tokenizer*")):
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = _damaged_file(name_or_path, flag)
            reason = f"its {where} cannot be read ({first}); copy or download it again"
        else:
            reason = (
                "no tokenizer there, in a folder or on the hub; save one with the model "
                "(tokenizer.save_pretrained)"
            )
        raise UserError(f"{flag} {name_or_path}: {reason}") from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or longest < 1:
        raise UserError(
            f"{flag} {name_or_path}: its tokenizer_config.json cannot be used: model_max_length is "
            f"{longest!r} (not a number above 0); correct it, or copy or download it again"
        )
    return tokenizer


def _damaged_file(folder: str, flag: str) -> str:
    """Which of a tokenizer's files cannot be read, and which field of it is the cause.

    Raises:
        UserError: one of them is not a JSON object.
    """
    for filename in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        fields = read_json(folder, filename, flag) or {}

        def read(kept: Mapping[str, Any], filename: str = filename) -> None:
            with TemporaryDirectory() as copy:
                for file in Path(folder).glob("*token*"):
                    (Path(copy) / file.name).symlink_to(file.absolute())
                (Path(copy) / filename).unlink()
                (Path(copy) / filename).write_text(json.dumps(kept), "utf-8")
                AutoTokenizer.from_pretrained(copy)

        field = culprit(read, fields) if fields else None
        if field is not None:
            return f"{filename}: {field} {json.dumps(fields[field])[:60]}"
    return "tokenizer.json" if read_json(folder, "tokenizer.json", flag) else "tokenizer"


def _home(name_or_path: str) -> str:
    """Where the tokenizer of ``name_or_path`` is.

    DeepSpeed-Chat saved a vocabulary without its special tokens, which would be read with those of
    another model; the configuration beside it names the checkpoint that it started from.
    """
    folder = Path(name_or_path)
    complete = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not folder.is_dir() or any((folder / name).exists() for name in complete):
        return name_or_path
    try:
        origin = json.loads((folder / "config.json").read_text("utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return name_or_path
    return origin if origin and isinstance(origin, str) else name_or_path


def _read_template(file: str, tokenizer: Any) -> str:
    try:
        template = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(
            f"--chat_template {file} cannot be read ({why}); name a file with a Jinja template"
        ) from error
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=template, tokenize=False
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            f"--chat_template {file} renders no chat ({failure(error)}); fix it"
        ) from error
    return template


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give the tokenizer a pad token other than EOS; True if one was added.

    transformers scores a sequence at its last token that is not padding, so a reward model
    whose pad is EOS would be read one token too early.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return False
    tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    return True


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's EOS and the checkpoint's own list."""
    ids = getattr(generation_config, "eos_token_id", None)
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(sorted({i for i in (*listed, tokenizer.eos_token_id) if i is not None}))
