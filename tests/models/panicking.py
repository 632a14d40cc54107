"""A tokenizer that panics inside the tokenizers library, at any character beyond U+FFFF."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from pathlib import Path

FATAL = "\U0001f41f"
_FIRST_BYTE_BEYOND = 0xF0
"""A map of characters that is too short: the library looks up a first byte of UTF-8 in it without a check."""


def with_panicking_tokenizer(model: Path, folder: Path) -> Path:
    """Copy a model into a new folder, and give the copy such a tokenizer."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    units = struct.pack(f"<I{_FIRST_BYTE_BEYOND}I", 4 * _FIRST_BYTE_BEYOND, *[0] * _FIRST_BYTE_BEYOND)
    charsmap = base64.b64encode(units + b"x\0").decode()
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    path.write_text(json.dumps(content))
    return folder
