"""Packed rows: token streams without padding, and attention over them."""

from dschat.models.packing.rows import PackedRows, Segments, pack

__all__ = ["PackedRows", "Segments", "pack"]
