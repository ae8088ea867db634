"""A kernel compiled once for all tests, and a cache of their own."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from sparse_mla_kernel import BASE, cache


class Built(NamedTuple):
    """A small decode kernel, cross-compiled: its sizes, and what the cache is given of it."""

    sizes: Mapping[str, int]
    launcher: bytes
    ptx: str
    cubin: bytes

    def keep(self, inputs: Mapping[str, object]) -> bool:
        return cache.keep(inputs, self.launcher, self.ptx, self.cubin)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("SPARSE_MLA_CACHE", raising=False)
        yield


@pytest.fixture(scope="session")
def built() -> Built:
    from sparse_mla_kernel import build

    sizes = {"batch": 2, "heads": 16, "padded": 32, "width": 8}
    kernel = build.decode_kernel(**sizes, push=None, schedule=BASE)
    compiled = build.compile_entry(*build.decode_entry(kernel, 3), "sm_90a")
    launcher = build.object_file(compiled)
    return Built(sizes | {"cap": 3}, launcher, compiled.__ptx__, compiled.__cubin__)


@pytest.fixture
def launch(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The small kernel's launcher. Without a GPU it checks its arguments and goes no further."""
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    inputs = cache.describe("decode", "sm_90a", built.sizes)
    assert built.keep(inputs)
    found = cache.find(inputs)
    assert found is not None
    return found.launch
