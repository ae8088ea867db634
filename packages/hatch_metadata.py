"""Add to a package's metadata what the three packages state alike.

`project.toml` beside this file holds it: the version, the authors, the addresses, and the first
of the keywords and classifiers. Each package's `hatch_build.py` calls `add_shared`.
"""

import tomllib
from pathlib import Path
from typing import Any

SHARED = Path(__file__).with_name("project.toml")


def add_shared(metadata: dict[str, Any], own: dict[str, Any]) -> None:
    """Fill the dynamic fields of `metadata`, the `[project]` table of one package, in place.

    `own` is the package's `[tool.hatch.metadata.hooks.custom]` table. Its `keywords` and
    `classifiers` follow the shared ones. Its `dependencies` may name a sibling as
    `sparse-mla-kernel=={version}`: a package works only with siblings of its own version.
    """
    shared = tomllib.loads(SHARED.read_text(encoding="utf-8"))
    metadata["version"] = shared["version"]
    metadata["authors"] = shared["authors"]
    metadata["urls"] = shared["urls"]
    for field in ("keywords", "classifiers"):
        metadata[field] = [*shared[field], *own.get(field, ())]
    if "dependencies" in own:
        metadata["dependencies"] = [
            dependency.replace("{version}", shared["version"]) for dependency in own["dependencies"]
        ]
