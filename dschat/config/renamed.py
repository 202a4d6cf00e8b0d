"""Names that are not flags: old flags, and settings of other trainers.

DeepSpeed-Chat's old flags still work, and with a warning the flags of the minor version before;
settings that were recorded under old names are translated alike: `old_flags.ini`. Other names are
refused in one line that says what to use: `other_trainers.ini` has the names of TRL, OpenRLHF, verl
and DeepSpeed-Chat.
"""

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from dschat.config.errors import UserError, did_you_mean

logger = logging.getLogger("dschat")

# A flag in a sentence, and its value.
_FLAG = re.compile(r"--([a-z][\w.]*\w)(?:=(\w+))?")


def _table(file: str) -> ConfigParser:
    table = ConfigParser(delimiters="=", interpolation=None)
    table.optionxform = str  # type: ignore[assignment,method-assign]  # keeps capitals
    table.read_string(Path(__file__).with_name(file).read_text("utf-8"))
    return table


_OLD = _table("old_flags.ini")
# Old flag -> its flag of today, and the value there.
RENAMED = {old: now.split(" ", 1) for old, now in _OLD.items("now")}


DEPRECATED = {old: version for version, of in _OLD.items("deprecated") for old in of.split()}


def accepted(names: Collection[str]) -> dict[str, type]:
    """Old flags that a dataclass with fields ``names`` accepts, and the type of their values."""
    kinds = {kind: _OLD["accepted"][kind.__name__].split() for kind in (bool, str, int)}
    return {old: kind for kind, of in kinds.items() for old in of if RENAMED[old][0] in names}


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` by the flags of today."""
    old: Callable[[str], Any] = values.get
    new = {name: value for name, value in values.items() if name not in RENAMED}
    for name, every in (("offload", "auto"), ("load_in_4bit", "all"), ("load_in_8bit", "all")):
        if name in values:
            new[name] = _parts(values[name], every)
    for name, (flag, item) in RENAMED.items():
        if flag in ("offload", "columns") and old(name):
            new[flag] = [*(new.get(flag) or ()), item.replace("COLUMN", str(old(name)))]
    if isinstance(old("deepspeed"), str) and old("deepspeed").lower() not in ("true", "false"):
        new["deepspeed_config"] = old("deepspeed_config") or old("deepspeed")
    if isinstance(old("packing"), bool):  # TRL's
        new["packing"] = "on" if old("packing") else "off"
    if old("add_eot_token") is not None:
        new["eot_token"] = (old("eot_token") or "<|endoftext|>") if old("add_eot_token") else None
    if old("reward_url") is None:  # of recorded settings: the endpoint was none
        new = {n: v for n, v in new.items() if n not in ("reward_url", "reward_url_weight")}
    if old("unsupervised_dataset_name") and old("unsupervised_dataset_config_name"):
        names = old("unsupervised_dataset_name"), old("unsupervised_dataset_config_name")
        new["unsupervised_dataset_name"] = ":".join(names)
    sinks = {name: old(f"enable_{name}") for name in ("tensorboard", "wandb")}
    if any(given is not None for given in sinks.values()):
        known = old("report_to") or ["tensorboard"]
        on = [name for name, given in sinks.items() if (name in known if given is None else given)]
        new["report_to"] = on or ["none"]
    return new


def _parts(value: Any, every: str) -> list[str] | None:
    """``--offload`` and its like as a list of words: they may be joined by commas, or be true,
    which is the word ``every``, or false.
    """
    words = [] if isinstance(value, bool) else [w for v in value or () for w in v.split(",")]
    if value is None or value is False or words in (["false"], ["no"]):
        return None
    return [every] if words in ([], ["true"], ["yes"]) else words


@cache  # once: train.py reads its flags a dozen times
def warn_if_deprecated(flag: str) -> None:
    if flag in DEPRECATED:
        now, value = RENAMED[flag]
        goes = f"{DEPRECATED[flag]} will not take it"
        logger.warning("--%s is deprecated: it is now --%s %s; version %s", flag, now, value, goes)


def set_in(args: Any, names: Collection[str]) -> dict[str, Any] | None:
    """The attributes of an object or a class, such as ``class args: kl_coef = 0.1``; of a config of
    transformers or TRL the attributes that were set, as plain values. None: it is none of these.

    ``names``: of flags.
    """
    if not hasattr(args, "__dict__"):
        return None
    theirs = [c for c in type(args).__mro__ if c.__module__.startswith(("transformers.", "trl."))]
    if not (theirs and is_dataclass(kind := theirs[0])):
        found = {name: inspect.getattr_static(args, name) for name in dir(args)}
        return {name: value for name, value in found.items() if not isinstance(value, property)}
    made = _made(kind, {})
    found = {n: v for n, v in vars(args).items() if v != getattr(made, n, None)}
    settings = {f.name: found[f.name] for f in fields(kind) if f.init and f.name in found}
    for name in [name for name in settings if name not in names]:  # what follows from the others
        value = settings.pop(name)
        if getattr(_made(kind, settings), name, None) == value:
            del found[name]
        else:
            settings[name] = value
    if found.get("push_to_hub") is True and "hub_model_id" in found:
        found["push_to_hub"] = found.pop("hub_model_id")
    if found.get("eval_strategy") == "steps":  # as here
        del found["eval_strategy"]
    found = {n: v.value if isinstance(v, Enum) else v for n, v in found.items()}
    return {n: int(v) if isinstance(v, float) and v % 1 == 0 else v for n, v in found.items()}


def _made(kind: Any, settings: dict[str, Any]) -> Any:
    """A config of these settings, if there is one; on a CPU TRL's default of bf16 needs use_cpu."""
    for given in (settings, settings | {"use_cpu": True}):
        with suppress(TypeError, ValueError):
            return kind(**given)


@cache
def elsewhere() -> dict[str, list[str]]:
    """Setting of another trainer, or a pattern such as ``vllm_*`` -> what is here; several where
    steps differ.
    """
    table = _table("other_trainers.ini")
    rows = [row for section in table.sections() for row in table.items(section)]
    return {name: text.strip().split("\n") for names, text in rows for name in names.split(", ")}


def hint(
    name: str, names: Collection[str], prefix: str = "", python: Mapping[str, str] | None = None
) -> str:
    """The end of an error about the unknown flag ``name``: what replaced it, its name here, or why
    it has none; for a name that no other trainer uses, the closest of ``names``.

    ``prefix``: "--" for flags, empty for keys; ``python``: flag -> its name as an argument of
    a constructor.
    """
    called = {known: (python or {}).get(known, known) for known in names}

    def form(found: re.Match) -> str:
        flag, value = found.groups()
        given = "" if value is None else f" {value}" if prefix else f'="{value}"'
        return f"{prefix}{called[flag]}{given}"

    rows, (flag, value) = elsewhere(), RENAMED.get(name, ("", ""))
    if flag in names and name not in rows:
        return f"; it is now {prefix}{called[flag]} {value}"
    texts = rows.get(name) or next((t for p, t in rows.items() if fnmatchcase(name, p)), None)
    if texts is None:
        return did_you_mean(name, called.values(), prefix)
    fitting = [t for t in texts if called.keys() >= {flag for flag, _ in _FLAG.findall(t)}]
    answers = [text for text in fitting if text.startswith("use ")] or fitting[:1]
    said = "".join(f"; {_FLAG.sub(form, text)}" for text in answers)
    return said.replace("; no: ", "; leave it out: ").replace(": and ", " and ")


def require_known(
    given: Iterable[Any],
    names: Collection[str],
    where: str,
    kind: str = "key",
    python: Mapping[str, str] | None = None,
) -> None:
    """Raise ``UserError``, which begins with ``where``, about all of ``given`` that are not among
    ``names``; see `hint`.
    """
    if hints := {str(n): hint(str(n), names, python=python) for n in given if n not in names}:
        raise UserError(f"{where}: {unknown(kind, hints)}")


def unknown(kind: str, hints: Mapping[str, str]) -> UserError:
    """The error about all names of a call that do not exist; ``hints`` has each one's `hint`."""
    if len(hints) == 1:
        return UserError(f"unknown {kind} " + "".join(*hints.items()))
    each = (f"{name} ({hint[2:]})" if hint else name for name, hint in hints.items())
    return UserError(f"unknown {kind}s: {', '.join(each)}")
