"""Formats sizes of memory and files, so that every message, table and page writes bytes in the same form."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size_text(size_bytes: float) -> str:
    """Format a number of bytes: 1536 as "1.50 KiB", 4096 as "4 KiB". Units are powers of 1024."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:,.2f}".removesuffix(".00") + f" {name}"
    return f"{size_bytes:.0f} B"
