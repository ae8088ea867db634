"""The hash of machine code: of what runs, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_mla_kernel import cross_compile
from sparse_mla_kernel.host.artifact import Artifact, _read, code_sha256

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return cross_compile(2, 16, 16, 8, 2)


def flipped(cubin: bytes, content: bytes) -> bytes:
    """The cubin with the first byte of a section's content changed."""
    at = cubin.index(content)
    return cubin[:at] + bytes([cubin[at] ^ 1]) + cubin[at + 1 :]


@pytest.mark.parametrize("section", [".text.", ".nv.constant0.", ".nv.info."])
def test_a_bit_that_the_gpu_reads_changes_the_hash(artifact: Artifact, section: str) -> None:
    _, sections = _read(artifact.cubin)
    (content,) = [data for name, _, data in sections if name.startswith(section)]
    changed = replace(artifact, cubin=flipped(artifact.cubin, content))
    assert changed.code_sha256 != artifact.code_sha256


def test_the_name_of_the_kernel_does_not_change_the_hash(artifact: Artifact) -> None:
    (kernel,), _ = _read(artifact.cubin)
    assert "SparseDcpDecode" in kernel
    renamed = artifact.cubin.replace(b"SparseDcpDecode", b"AnotherDecodeXY")
    assert renamed != artifact.cubin
    assert code_sha256(renamed) == artifact.code_sha256


def test_the_sizes_that_only_the_name_holds_do_not_change_the_hash(artifact: Artifact) -> None:
    wider = cross_compile(2, 16, 16, 8, 4)
    assert wider.cubin != artifact.cubin
    assert wider.code_sha256 == artifact.code_sha256


def test_a_file_that_is_no_cubin_is_refused(artifact: Artifact) -> None:
    for cubin in (b"", b"\x7fELF\x02\x01" + b"\xff" * 200, artifact.cubin[:9000]):
        with pytest.raises(
            ValueError, match=r"^cubin must (be an ELF file|hold a kernel), got \d+"
        ):
            code_sha256(cubin)
    for wrong in (None, "x", 3):
        with pytest.raises(TypeError, match=r"^cubin must be bytes, got a (NoneType|str|int)$"):
            code_sha256(wrong)  # type: ignore[arg-type]
