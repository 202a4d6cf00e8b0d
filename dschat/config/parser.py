"""Parses flags and ``--config file.yaml`` into a validated config dataclass, and back to an argv.

Neither torch nor transformers here: ``--help`` and mistyped flags must answer at once.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from dschat.config import UserError, renamed
from dschat.config.fields import AUTO, IntOrAuto, read_named, type_problem

Config = TypeVar("Config")
# argparse's message -> ours, after the name of the flag.
_REWORDINGS = (
    (r"invalid choice: (.*?) \(choose from (.*)\)", r"\1 is not one of \2"),
    (r"expected one argument", "needs a value"),
    (r"expected at least one argument", "needs at least one value"),
)
_TRUTHS = dict.fromkeys(("yes", "true", "t", "y", "1"), True)
_TRUTHS |= dict.fromkeys(("no", "false", "f", "n", "0"), False)


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    takes_file: bool = True,
    first: str | None = None,
) -> Config:
    """The validated ``config_class`` from ``argv`` (default: the command line).

    Flags override the YAML file of ``--config``, which overrides defaults. ``takes_file``: whether
    to accept ``--config``. ``first``: the flag of values that come before any flag.

    Raises:
        UserError: an unknown flag or key (with the closest name), a wrong type or choice, or an
            error from ``validate()``.
    """
    words = sys.argv[1:] if argv is None else argv
    if first is not None and words and not words[0].startswith("-"):
        words = [f"--{first}", *words]
    config: Any = config_class(**given(config_class, words, takes_file))
    config.validate()
    return config


def given(config_class: type, argv: Sequence[str], takes_file: bool = True) -> dict[str, Any]:
    """The fields set in ``argv`` or its ``--config`` file, with their types; no defaults."""
    flags = _parser(config_class, takes_file).values(argv)
    path = flags.pop("config", None)
    if path is None:
        return flags
    return values_of(config_class, read_yaml(path), where=path) | flags


def values_of(config_class: type, mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``mapping`` (from YAML) as typed fields; ``where`` is the start of every error message."""
    names = {f.name for f in fields(config_class)}
    values = {str(key).replace("-", "_"): value for key, value in mapping.items()}
    renamed.require_known(values, names, where)
    for key, value in values.items():
        if isinstance(value, Mapping):
            if not _takes(config_class, key, "dict["):
                raise UserError(f"{where}: {key} takes a value, not a mapping")
            if problem := type_problem(value, dict):
                raise UserError(f"{where}: {key} {problem}")
        if isinstance(value, bool) and _takes(config_class, key, "'on'"):
            values[key] = "on" if value else "off"  # the words that YAML 1.1 reads as truth values
        if isinstance(value, list) and not _takes(config_class, key, "list["):
            raise UserError(f"{where}: {key} takes one value, not a list")
    try:
        return _parser(config_class).values(to_flags(values))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _takes(config_class: type, name: str, kind: str) -> bool:
    return kind in str(get_type_hints(config_class)[name])


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """The argv that sets ``values``: the inverse of ``given``. None means not set."""
    argv = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            value = json.dumps(value)
        if value is True:
            argv.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            argv += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-") or value == "":
            argv.append(f"--{name}={value}")  # argparse would read -1e-5 as a flag
        else:
            argv += [f"--{name}", str(value).lower() if value is False else str(value)]
    return argv


def flag_names(config_class: type) -> set[str]:
    """Every spelling of every flag, with underscores and without the leading dashes."""
    options = _parser(config_class)._option_string_actions
    return {option.lstrip("-").replace("-", "_") for option in options} - {"h", "help"}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: no such file, broken YAML (with its line), a duplicate key, or not a mapping.
    """
    text = read_named(path, str(path), "a YAML file")
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}: broken YAML{line}: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # a date such as 2020-13-01, or too deep a tree
        raise UserError(f"{path}: broken YAML: {error}") from None
    if not isinstance(content or {}, dict):
        raise UserError(f"{path}: must be a mapping of names to values")
    return content or {}


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML silently keeps the last one, and what YAML 1.1 reads
    as other numbers: 010 as 8, 12:30:45 as 45045.
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        is_octal = node.tag.endswith(":int") and re.match("[-+]?0[0-7_]", str(node.value))
        if is_octal or (":" in node.value and node.tag.endswith((":int", ":float"))):
            problem = f"{node.value} is another number in YAML 1.1; quote it, or write it otherwise"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if name in lines and name != "<<":
                problem = f"duplicate key {key.value}, also at line {lines[name]}; leave one out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = line
        return node


def underscored(token: str) -> str:
    """``--some-flag=a-b`` as ``--some_flag=a-b``; only long flags are changed."""
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class _Parser(argparse.ArgumentParser):
    """One option per dataclass field; raises ``UserError`` and returns given values only.

    ``--help`` groups the inherited fields by the dataclass that declares them; the first line of
    its docstring is the title.
    """

    def __init__(self, config_class: type, takes_file: bool = False):
        super().__init__(
            usage="%(prog)s [FLAGS]",
            description=_title(config_class),
            formatter_class=partial(argparse.HelpFormatter, max_help_position=38, width=100),
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        text = "Show the flags that most runs need; all: every flag."
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="all", help=text)
        if takes_file:
            text = "YAML file with flag names as keys; flags override it."
            self.add_argument("--config", help=text)
        self.made_of = config_class, takes_file
        self.not_short: list[argparse.Action] = []  # flags that --help leaves to --help all
        hints = get_type_hints(config_class)
        groups = {c: self.add_argument_group(_title(c).rstrip(".")) for c in config_class.__mro__}
        owners = {n: c for c in reversed(config_class.__mro__) for n in get_annotations(c)}
        for f in fields(config_class):
            group = self if owners[f.name] is config_class else groups[owners[f.name]]
            names = (f"--{f.name}", *f.metadata.get("aliases", ()))
            action = group.add_argument(*names, **_options(f, hints[f.name]))
            if not f.metadata.get("short"):
                self.not_short.append(action)
            if action.const is not None or action.nargs == "*":
                off = False if action.const is True else None
                no: dict[str, Any] = {"dest": f.name, "action": "store_const", "const": off}
                self.add_argument(f"--no_{f.name}", help=argparse.SUPPRESS, **no)
        for name, kind in renamed.accepted(hints).items():
            old: dict[str, Any] = {"nargs": "?", "const": True, "type": partial(_read, kind)}
            self.add_argument(f"--{name}", help=argparse.SUPPRESS, **old)

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        namespace, extras = self.parse_known_args([underscored(token) for token in argv])
        if extras:
            self._refuse(extras, argv)
        for name in vars(namespace):
            renamed.warn_if_deprecated(name)
        return renamed.translated(vars(namespace))

    def _refuse(self, extras: Sequence[str], argv: Sequence[str]) -> NoReturn:
        """All unknown flags at once; verl's settings too, which are written without dashes."""
        names = {option.lstrip("-") for option in self._option_string_actions}
        written = {underscored(token): token for token in argv}
        words = [written[extra].partition("=") for extra in extras]
        typed = [name for name, _, _ in words]
        hints = {t: renamed.hint(underscored(t).lstrip("-"), names, "--") for t in typed}
        # A file such as data.jsonl is no setting.
        verl = {name for name, sign, _ in words if sign and "." in name and hints[name]}
        is_flag = {t: t.startswith("--") or t in verl for t in typed}
        if not is_flag[typed[0]]:
            raise UserError(f"unexpected argument {extras[0]!r}; flags look like --name value")
        raise renamed.unknown("flag", {t: h for t, h in hints.items() if is_flag[t]})

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument ([^\s/:]+)[^:]*: (.*)", message, flags=re.DOTALL)
        assert match, message
        flag, problem = match.groups()
        for pattern, wording in _REWORDINGS:
            problem = re.sub(pattern, wording, problem)
        raise UserError(f"{flag} {problem}")


_parser = cache(_Parser)  # train.py reads flags and recipes a dozen times


class _Help(argparse.Action):
    """Prints the short flags, or with ``all`` every flag, and exits."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        parser = _Parser(*parser.made_of)  # not the one that is kept: what it hides stays hidden
        if value != "all":
            for action in parser.not_short:
                action.help = argparse.SUPPRESS
            parser.epilog = f"--help all shows {len(parser.not_short)} more flags."
        parser.print_help()
        parser.exit()


def _options(f: Field, hint: Any) -> dict[str, Any]:
    """What argparse is told about a field: its type, number of values, and help with default."""
    default = f.default if f.default_factory is MISSING else f.default_factory()
    help = f.metadata.get("help", "").replace("%", "%%")
    if default not in (None, "") and default is not False:
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        help += f" (default: {shown})"
    given = ("action", "nargs", "const")
    options = {key: f.metadata[key] for key in given if key in f.metadata}
    options["help"] = help
    if get_origin(hint) is Union and hint != IntOrAuto:  # Optional, or names and file.py:NAME
        if str in get_args(hint)[1:]:
            return options | {"metavar": "NAME"}
        hint = get_args(hint)[0]
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
        options.setdefault("nargs", "+")
    if get_origin(hint) is Literal:
        return options | {"choices": get_args(hint)}
    if get_origin(hint) is dict:
        return options | {"type": partial(_read, dict), "metavar": "JSON"}
    options["type"] = partial(_read, hint, form=f.metadata.get("form", ""))
    if hint is bool:
        return options | {"nargs": "?", "const": True, "metavar": "true|false"}
    last_word = f.name.rpartition("_")[2].upper()
    return options | {"metavar": {int: "N", float: "X", IntOrAuto: "N"}.get(hint, last_word)}


def _read(kind: Any, text: str, form: str = "") -> Any:
    """A flag's value, of a type as in `dschat.config.fields`; ``form`` ends the error."""
    try:
        if kind is bool:
            return _TRUTHS[text.lower()]
        if kind == IntOrAuto:
            return text if text == AUTO else int(text)
        if kind is dict:
            return dict(json.loads(text))
        return kind(text)
    except (TypeError, ValueError, KeyError, RecursionError):
        raise argparse.ArgumentTypeError(f"{text!r} {type_problem(text, kind)}{form}") from None


def _title(config_class: type) -> str:
    return (config_class.__doc__ or "").strip().partition("\n")[0]
