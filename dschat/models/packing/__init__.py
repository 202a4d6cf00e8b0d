"""Packed rows: token streams without padding, and attention over them."""

from dschat.models.packing.rows import PackedRows, pack
from dschat.models.packing.segments import Segments

__all__ = ["PackedRows", "Segments", "pack"]
