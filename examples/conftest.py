"""Recordings for the tests beside them."""

from pathlib import Path

import pytest

from examples.recording import Recording


@pytest.fixture(scope="module")
def recording(request: pytest.FixtureRequest) -> Recording:
    """The recording in the test module's folder."""
    folder = Path(str(request.node.path)).parent
    try:
        return Recording.load(folder)
    except FileNotFoundError:
        pytest.skip(f"{folder.name} has no recording: python -m examples --out DIR, on an H200")
