"""What a knob is: a dataclass field with its help text; and the error for one that cannot work.

It must not know any knob.
"""

from dataclasses import field
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend: one line naming flag or file, and the remedy. Exit code 2."""


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that carries its help text; mutable defaults are copied per instance."""
    metadata["help"] = help
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: bool, message: str) -> None:
    """Raise ``UserError`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)
