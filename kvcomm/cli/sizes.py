"""How the commands write sizes."""

from __future__ import annotations


def size_text(count: float) -> str:
    """``count`` bytes for a person: ``723 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
