"""Names a checkpoint's tensors as a model expects them, and checks their values."""

import re
from collections.abc import Callable, Collection, Iterator

from torch import Tensor

from dschat.config import UserError
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.checkpoint_tensors import is_constant, text_keys, value_fault

# Prefixes of training wrappers: DataParallel and DeepSpeed, torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

# Aliases of a parameter: the norms of the oldest checkpoints, and GPT-NeoX's head, which is
# embed_out on disk (seen in transformers 5.23) but lm_head in its module.
_ALIASES = (
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"^lm_head\."), "embed_out."),
)


def normalize(name: str, expected: Collection[str], prefix: str) -> str | None:
    """The member of ``expected`` that ``name`` of a checkpoint stands for; None for a constant.

    ``prefix`` is the architecture's base-model prefix with its dot ("model.", "transformer.",
    "gpt_neox."): a checkpoint of the bare base model lacks it, another may have it where
    ``expected`` does not. A weight without a match in ``expected`` keeps its name, so that the
    consumer can reject it or ignore it (a stored copy of a tied head).
    """
    plain = _WRAPPERS.sub("", name)
    for renamed in (name, plain, *(old.sub(new, plain) for old, new in _ALIASES)):
        for candidate in (renamed, prefix + renamed, renamed.removeprefix(prefix)):
            if candidate in expected:
                return candidate
    return None if is_constant(plain) else name


def normalized_names(expected: Collection[str], prefix: str) -> Callable[[str], str | None]:
    """`normalize` for these ``expected`` names: the ``names`` argument of
    `CheckpointFiles.tensors`."""
    members = frozenset(expected)
    return lambda name: normalize(name, members, prefix)


def names_on_disk(
    files: CheckpointFiles, expected: Collection[str], prefix: str
) -> Callable[[str], str | None]:
    """`normalized_names` for the checkpoint ``files``, of which only the text model is read."""
    names = normalized_names(expected, prefix)
    plain = {key: name for name, key in text_keys(files.keys).items()}
    return lambda key: names(plain[key]) if key in plain else None


def sound_weights(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the stream; ``UserError`` at the first weight that is not finite floating point."""
    for name, tensor in stream:
        if (fault := value_fault(tensor)) is not None:
            raise UserError(f"{name} {fault}; name another checkpoint, or copy it again")
        yield name, tensor
        del tensor  # NOTE: a tensor that is kept keeps its file mapped
