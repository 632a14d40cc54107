"""Tell the package's build what the package requires: the lines of requirements.txt."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RequirementsHook(MetadataHookInterface):
    """Sets the package's dependencies."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the lines of requirements.txt, without comments, to the metadata."""
        text = Path(self.root, "requirements.txt").read_text(encoding="utf-8")
        lines = (re.split(r"(?:^|\s)#", line)[0].strip() for line in text.splitlines())
        metadata["dependencies"] = [line for line in lines if line]
