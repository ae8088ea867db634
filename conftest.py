"""What holds for the tests of all packages: which are slow, and which compile a kernel."""

import sys
from collections.abc import Generator
from typing import NoReturn, Self

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out unless the `-m` option names them.

    `addopts` can't do this: the last `-m` wins, so `-m "not compiler"` would run slow tests.
    """
    asked = config.option.markexpr
    if "slow" not in asked:
        config.option.markexpr = f"({asked}) and not slow" if asked else "not slow"


@pytest.fixture(scope="session")
def compiles() -> None:
    """What a fixture that compiles a kernel takes, so that each test that uses it is marked."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that take the fixture `compiles`, directly or by way of another fixture."""
    for item in items:
        if "compiles" in getattr(item, "fixturenames", ()):
            item.add_marker("compiler")


class RefusedCompiler:
    """Stands in for `cute.compile` while a test runs that isn't marked as compiling."""

    def __getitem__(self, options: object) -> Self:
        """Take the options that `cute.compile` takes, and refuse all the same."""
        return self

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        """Fail the test."""
        pytest.fail("a test that compiles a kernel must be marked `compiler`, got one without mark")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the marker `compiler` to what tests do: without it, compiling in this process fails."""
    compiles = any(item.get_closest_marker(name) for name in ("compiler", "gpu"))
    with pytest.MonkeyPatch.context() as patch:
        if not compiles and "cutlass.cute" in sys.modules:
            patch.setattr(sys.modules["cutlass.cute"], "compile", RefusedCompiler())
        return (yield)
