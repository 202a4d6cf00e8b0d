"""Loads tokenizers and completes them: EOS, pad token and chat template.

The completed tokenizer is saved with the model, so that other programs use what training used.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.config.fields import read_text
from dschat.models import hub
from dschat.models.chat_template import (
    default_template,
    failure,
    merge_system,
    rendered,
    set_template_defaults,
    turn_ends,
)
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.config_files import read_generation_config

PAD_TOKEN = "<|pad|>"
TOKENIZER_CONFIG = "tokenizer_config.json"


def load_tokenizer(
    name_or_path: str, flag: str, trust_remote_code: bool = False, **flags: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, completed by ``flags``; see `complete_tokenizer`.

    Raises:
        UserError: naming ``flag``: no tokenizer, or one without EOS.
    """
    files = CheckpointFiles(name_or_path, flag, trust_remote_code)
    return complete_tokenizer(files, read_tokenizer(files), **flags)


def complete_tokenizer(
    files: CheckpointFiles,
    tokenizer: PreTrainedTokenizerBase,
    eot_token: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    system_message: str = "merge",
) -> PreTrainedTokenizerBase:
    """The ``tokenizer`` of ``files``, changed in place: with an EOS, a pad token and a template.

    Args:
        eot_token: replaces EOS as the end of an answer; added to the vocabulary if new.
        chat_template: a file that replaces the tokenizer's own template.
        chat_template_kwargs: become defaults of the template's variables.
        system_message: "merge" lets a template without a place for a system message put its text
            in front of the first user turn.

    Raises:
        UserError: no EOS; or a template that is empty, or does not read one of the variables.
    """
    if eot_token is not None and eot_token != tokenizer.eos_token:
        # Everything reads EOS as the end of an answer; a template may contain the old one.
        former, template = tokenizer.eos_token, tokenizer.chat_template
        tokenizer.add_special_tokens({"eos_token": eot_token})
        if former and isinstance(template, str):
            tokenizer.chat_template = template.replace(former, eot_token)
    if tokenizer.eos_token_id is None:
        raise files.error(
            ": its tokenizer has no EOS token; set tokenizer.eos_token, or add one with --eot_token"
        )
    if tokenizer.pad_token_id is None:
        # Masks come from lengths, so any id can fill a batch.
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template, tokenizer)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = default_template(tokenizer)
    if not str(tokenizer.chat_template).strip():
        origin = f"--chat_template {chat_template}"
        origin = origin if chat_template else f"{files.flag} {files.name}"
        raise UserError(f"{origin}: the chat template is empty; restore it, or name another one")
    if system_message == "merge":
        merge_system(tokenizer)
    set_template_defaults(tokenizer, chat_template_kwargs or {})
    tokenizer.generation_config = read_generation_config(files)  # for `stop_ids`
    return tokenizer


def read_tokenizer(files: CheckpointFiles) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, unchanged: it may lack EOS, pad token and chat template.

    Raises:
        UserError: no tokenizer, a damaged one, or one that needs its own code.
    """
    source = _source(files)
    hub.prepare(source)
    try:
        trust = files.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    # It raises any exception, even a bare Exception of the Rust library.
    except Exception as error:
        if not files.trust_remote_code and files.brings_code(TOKENIZER_CONFIG):
            reason = (
                "its tokenizer needs its own Python code, which does not run by default: "
                "read it, and pass --trust_remote_code if you trust it"
            )
        elif source != files.name:
            reason = (
                f"it has only a vocabulary, as DeepSpeed-Chat saved it, and the tokenizer of its "
                f"base model ({source}) cannot be loaded; copy that one's files into the folder"
            )
        elif any(Path(files.name).glob("tokenizer*")):
            where = _damaged_file(files)
            reason = f"its {where} cannot be read ({first_line(error)}); copy or download it again"
        else:
            reason = (
                "no tokenizer in this folder or on the hub; save one with the model "
                "(tokenizer.save_pretrained)"
            )
        raise files.error(f": {reason}") from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or longest < 1:
        problem = f"cannot be used: model_max_length is {longest!r} (not a number above 0)"
        raise files.file_error(TOKENIZER_CONFIG, problem)
    return tokenizer


def _damaged_file(files: CheckpointFiles) -> str:
    """The file, or files, that may break a tokenizer.

    Raises:
        UserError: one of the files is not a JSON object.
    """
    for filename in (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"):
        files.json(filename)
    template = Path(files.name) / "chat_template.jinja"
    if template.exists() and "\ufffd" in template.read_text("utf-8", "replace"):
        return template.name
    return f"tokenizer.json or {TOKENIZER_CONFIG}" if files.json("tokenizer.json") else "tokenizer"


def _source(files: CheckpointFiles) -> str:
    """The folder or hub name to load the tokenizer of ``files`` from.

    DeepSpeed-Chat saved the vocabulary without special tokens; loaded as it is, the tokenizer would
    get wrong ones. The folder's config.json names the checkpoint it started from, which has them.
    """
    folder = Path(files.name)
    complete = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model")
    if not folder.is_dir() or any((folder / name).exists() for name in complete):
        return files.name
    try:
        origin = (files.json(CONFIG) or {}).get("_name_or_path")
    except UserError:
        return files.name
    return origin if origin and isinstance(origin, str) else files.name


def _read_template(file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(
            f"--chat_template {file} cannot be read ({reason}); name a file with a Jinja template"
        ) from error
    try:
        rendered(tokenizer, [{"role": "user", "content": "?"}], chat_template=template)
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
