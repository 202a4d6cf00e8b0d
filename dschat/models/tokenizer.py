"""Loads tokenizers and completes them: EOS, pad token and chat template.

The completed tokenizer is saved with the model, so that other programs use what training used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.config.fields import read_text
from dschat.models import hub
from dschat.models.chat_template import default_template, failure, turn_ends
from dschat.models.config_files import culprit, read_generation_config, read_json
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

    Args:
        eot_token: replaces EOS as the end of an answer; added to the vocabulary if new.
        chat_template: a file that replaces the tokenizer's own template.

    Raises:
        UserError: naming ``flag``: no tokenizer, or one without EOS.
    """
    tokenizer = read_tokenizer(name_or_path, flag, trust_remote_code)
    if eot_token is not None and eot_token != tokenizer.eos_token:
        # Everything reads EOS as the end of an answer; a template may contain the old one.
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
        # Masks come from lengths, so any id can fill a batch.
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template, tokenizer)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    if not str(tokenizer.chat_template).strip():
        origin = f"--chat_template {chat_template}" if chat_template else f"{flag} {name_or_path}"
        raise UserError(f"{origin}: the chat template is empty; restore it, or name another one")
    tokenizer.generation_config = read_generation_config(name_or_path, flag)  # for `stop_ids`
    return tokenizer


def read_tokenizer(
    name_or_path: str, flag: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, unchanged: it may lack EOS, pad token and chat template.

    Raises:
        UserError: naming ``flag``: no tokenizer, a damaged one, or one that needs its own code.
    """
    source = _source(name_or_path)
    hub.prepare(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    # It raises any exception, even a bare Exception of the Rust library.
    except Exception as error:
        if not trust_remote_code and brings_code(name_or_path, "tokenizer_config.json"):
            reason = (
                "its tokenizer needs its own Python code, which does not run by default: "
                "read it, and pass --trust_remote_code if you trust it"
            )
        elif source != name_or_path:
            reason = (
                f"it has only a vocabulary, as DeepSpeed-Chat saved it, and the tokenizer of its "
                f"base model ({source}) cannot be loaded; copy that one's files into the folder"
            )
        elif any(Path(name_or_path).glob("tokenizer*")):
            where = _damaged_file(name_or_path, flag)
            reason = f"its {where} cannot be read ({first_line(error)}); copy or download it again"
        else:
            reason = (
                "no tokenizer in this folder or on the hub; save one with the model "
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
    """The file that breaks a tokenizer, with the field if known: "FILE: FIELD VALUE".

    Raises:
        UserError: one of the files is not a JSON object.
    """
    for filename in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        fields = read_json(folder, filename, flag) or {}

        def read(fields: Mapping[str, Any], filename: str = filename) -> None:
            with TemporaryDirectory() as copy:
                for file in Path(folder).glob("*token*"):
                    (Path(copy) / file.name).symlink_to(file.absolute())
                (Path(copy) / filename).unlink()
                (Path(copy) / filename).write_text(json.dumps(fields), "utf-8")
                AutoTokenizer.from_pretrained(copy)

        field = culprit(read, fields) if fields else None
        if field is not None:
            return f"{filename}: {field} {json.dumps(fields[field])[:60]}"
    template = Path(folder) / "chat_template.jinja"
    if template.exists() and "\ufffd" in template.read_text("utf-8", "replace"):
        return template.name
    return "tokenizer.json" if read_json(folder, "tokenizer.json", flag) else "tokenizer"


def _source(name_or_path: str) -> str:
    """The folder or hub name to load the tokenizer of ``name_or_path`` from.

    DeepSpeed-Chat saved the vocabulary without special tokens; loaded as it is, the tokenizer would
    get wrong ones. The folder's config.json names the checkpoint it started from, which has them.
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


def _read_template(file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(
            f"--chat_template {file} cannot be read ({reason}); name a file with a Jinja template"
        ) from error
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=template, tokenize=False
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            f"--chat_template {file} cannot render a chat ({failure(error)}); fix it"
        ) from error
    return template


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a pad token other than EOS.

    transformers takes a sequence's score at its last non-pad token. If pad is EOS, that is one
    token before the one that training used.
    """
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Every id that ends an answer, sorted: EOS, those with which the chat template ends a turn,
    and those of the generation configs: ``generation_config``, and the one beside the tokenizer.

    An answer's last token is its first of them, in every step and program. What the template writes
    after it has no loss and is in front of no score.
    """
    found = {tokenizer.eos_token_id, *turn_ends(tokenizer, str(tokenizer.chat_template))}
    for config in (generation_config, getattr(tokenizer, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found |= {*ids} if isinstance(ids, (list, tuple)) else {ids}
    return tuple(sorted(found - {None}))
