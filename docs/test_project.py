"""What the project states about itself in several files is the same in all of them."""

import re
import tomllib
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SHARED = tomllib.loads((ROOT / "packages" / "project.toml").read_text())
add_shared = run_path(str(ROOT / "packages" / "hatch_metadata.py"))["add_shared"]


def text(path):
    return (ROOT / path).read_text()


def toml(path):
    return tomllib.loads(text(path))


def pinned(package):
    """The version of `package` in constraints.txt."""
    (version,) = re.findall(rf"^{package}==(\S+)$", text("constraints.txt"), re.MULTILINE)
    return version


@pytest.fixture(params=PACKAGES, ids=lambda path: path.name)
def package(request):
    """One package's `[project]` table with the shared fields in it."""
    settings = toml(request.param / "pyproject.toml")
    add_shared(settings["project"], settings["tool"]["hatch"]["metadata"]["hooks"]["custom"])
    return settings["project"]


def test_three_packages():
    assert [path.name for path in PACKAGES] == ["kernel", "reference", "verify"]


def test_shared_fields_are_dynamic(package):
    """hatchling refuses a field that is both stated and dynamic, so none is stated twice."""
    shared = {"authors", "classifiers", "keywords", "urls", "version"}
    assert shared <= set(package["dynamic"])
    assert package["version"] == SHARED["version"]


def test_siblings_are_pinned_to_the_same_version(package):
    siblings = [need for need in package["dependencies"] if need.startswith("sparse-mla-")]
    assert len(siblings) == (2 if package["name"] == "sparse-mla-verify" else 0)
    assert all(need.endswith(f"=={SHARED['version']}") for need in siblings)


def test_no_dependency_keeps_a_placeholder(package):
    assert [need for need in package["dependencies"] if "{" in need] == []


def test_shared_build_hooks_are_equal():
    assert len({(path / "hatch_build.py").read_text() for path in PACKAGES}) == 1


def test_citation_is_of_this_version():
    (version,) = re.findall(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE)
    assert version == SHARED["version"]


def test_changelog_has_this_version():
    releases = re.findall(r"^## \[([^\]]+)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert releases[1] == SHARED["version"]


def test_pre_commit_runs_the_pinned_ruff():
    versions = re.findall(r"ruff==([\d.]+)", text(".pre-commit-config.yaml"))
    assert len(versions) == 2
    assert set(versions) == {pinned("ruff")}


def test_the_workflow_runs_every_supported_python():
    (matrix,) = re.findall(r"^ +python: \[(.+)\]$", text(".github/workflows/ci.yml"), re.MULTILINE)
    tested = re.findall(r'"([\d.]+)"', matrix)
    classified = [re.findall(r":: (3\.\d+)$", line) for line in SHARED["classifiers"]]
    assert tested == [version for found in classified for version in found]


def test_the_least_python_is_the_same_everywhere(package):
    (least, *_) = re.findall(r":: (3\.\d+)", "\n".join(SHARED["classifiers"]))
    tools = toml("pyproject.toml")["tool"]
    assert package["requires-python"] == f">={least}"
    assert tools["mypy"]["python_version"] == least
    assert tools["ruff"]["target-version"] == f"py{least.replace('.', '')}"
