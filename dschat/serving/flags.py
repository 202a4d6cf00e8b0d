"""Declares the flags of ``dschat serve``."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from dschat.config import UserError
from dschat.config.data import TemplateConfig
from dschat.config.errors import require
from dschat.config.fields import flag, require_valid
from dschat.reporting.run_files import named_paths

KEYS_VARIABLE = "DSCHAT_API_KEYS"


@dataclass
class ServeConfig(TemplateConfig):
    """Serve models with OpenAI's HTTP interface, and a web chat that compares them."""

    path: Optional[list[str]] = flag(
        None,
        "Models: folders or hub names, or NAME=FOLDER; requests without a model get the first.",
        short=True,
        action="extend",
    )
    reward_model: Optional[str] = flag(
        None, "Reward model of step 2, whose scores the web chat shows.", short=True
    )
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0: all of this machine.", short=True)
    port: int = flag(8000, "Port to listen on; 0: a free one.", ge=0, le=65535, short=True)
    preferences: str = flag(
        "output/preferences.jsonl",
        "File to which the web chat appends preferences, for --data_path of step 2.",
        short=True,
    )
    api_key_file: Optional[str] = flag(
        None,
        f"File with API keys, one per line, that requests must have; or set {KEYS_VARIABLE}.",
        short=True,
    )
    allow_origin: Optional[list[str]] = flag(
        None, "Web pages of these origins may send requests (CORS); default: only its own."
    )
    dtype: Literal["auto", "fp32", "bf16"] = flag(
        "auto",
        "Precision of the weights; auto is bf16 on an accelerator and fp32 on a CPU.",
        short=True,
    )
    max_seq_len: Optional[int] = flag(
        None, "Longest prompt + answer; default: the model's positions, at most 32768.", ge=2
    )
    max_num_seqs: int = flag(64, "Answers that decode together, per model.", ge=1)
    max_waiting: int = flag(
        256, "Answers that wait for a slot, per model; more are refused with status 429.", ge=0
    )
    kv_cache_gib: Optional[float] = flag(
        None, "KV cache size in GiB per model; default: room for --max_num_seqs.", gt=0
    )
    request_timeout_s: float = flag(
        600.0, "Longest time for a request in seconds, waiting included.", gt=0
    )
    drain_s: float = flag(
        20.0, "Time for answers that run when the server is stopped, in seconds.", ge=0
    )
    max_request_mib: float = flag(1.0, "Largest request body in MiB.", gt=0)
    trust_remote_code: bool = flag(False, "Run Python code that comes with a checkpoint.")

    def validate(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first invalid flag."""
        require_valid(self)
        require(bool(self.models), "--path is missing; name a model's folder")

    @property
    def models(self) -> list[tuple[str, str]]:
        """Name and path of each model."""
        return named_paths(self.path or [], "--path")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def api_keys(config: ServeConfig, variable: str | None) -> list[str]:
    """Keys of ``--api_key_file`` and of the environment ``variable`` (separated by commas)."""
    keys = (variable or "").split(",")
    if variable is not None and not any(map(str.strip, keys)):
        raise UserError(f"{KEYS_VARIABLE} is set and has no key; write one, or unset it")
    if config.api_key_file is not None:
        try:
            keys += Path(config.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise UserError(f"--api_key_file {config.api_key_file}: {reason}") from None
    found = [key.strip() for key in keys if key.strip()]
    if config.api_key_file is not None and not found:
        raise UserError(f"--api_key_file {config.api_key_file} has no key; write one per line")
    return found
