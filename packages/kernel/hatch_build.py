"""Take in, when the package is built, what all three packages state alike."""

from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SharedMetadata(MetadataHookInterface):
    """The hook that hatchling calls for the fields listed as `dynamic` in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the dynamic fields of `metadata`, the package's `[project]` table, in place."""
        script = Path(self.root).parent / "hatch_metadata.py"
        if script.exists():  # A source distribution lacks it: its PKG-INFO has the fields already.
            run_path(str(script))["add_shared"](metadata, self.config)
