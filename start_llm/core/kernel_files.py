"""Files in which Linux states what it knows of the machine."""

from pathlib import Path


def kernel_text(file: Path) -> str:
    """Return what such a file states; "" if it cannot be read."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
