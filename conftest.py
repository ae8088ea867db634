"""What holds for the tests of all packages: slow tests run only when they are asked for."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out unless the `-m` option names them.

    `addopts` can't do this: the last `-m` wins, so `-m "not compiler"` would run slow tests.
    """
    asked = config.option.markexpr
    if "slow" not in asked:
        config.option.markexpr = f"({asked}) and not slow" if asked else "not slow"
