"""What the compiler made of a kernel: PTX and machine code, its disassembly and its hash."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Artifact:
    """What the compiler made of a kernel.

    Args:
        arch: Architecture, such as ``"sm_90a"``.
        ptx: The PTX.
        cubin: The machine code, an ELF file. It depends only on the kernel's source, the DSL's
            version and the static sizes, not on the computer or the Python version.
    """

    arch: str
    ptx: str
    cubin: bytes

    @property
    def code_sha256(self) -> str:
        """The machine code's hash, in hex (:func:`code_sha256`)."""
        return code_sha256(self.cubin)

    def sass(self) -> str:
        """The disassembly.

        Raises:
            FileNotFoundError: ``nvdisasm`` is neither on the PATH nor installed as a package.
            RuntimeError: ``nvdisasm`` could not read the cubin.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            done = subprocess.run(
                [_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
        return done.stdout


#: Sections of a cubin that hold no code: names, notes of the tools, and debug information.
_NOT_CODE = (".strtab", ".shstrtab", ".symtab", ".note", ".debug", ".rel.debug", ".rela.debug")


def code_sha256(cubin: bytes) -> str:
    """SHA-256, in hex, of what a GPU uses of a cubin: code, constants and launch attributes.

    The names of symbols are left out, because the DSL makes them of the kernel's class, its folder
    and the static sizes: a kernel that moves to another file keeps its hash.

    Args:
        cubin: An ELF file that holds one kernel or more.

    Raises:
        ValueError: ``cubin`` is not an ELF file.
        ModuleNotFoundError: pyelftools is not installed (the extra ``inspect``).
    """
    if not isinstance(cubin, bytes):
        raise TypeError(f"cubin must be bytes, got a {type(cubin).__name__}")
    from elftools.common.exceptions import ELFError

    try:
        kernels, sections = _read(cubin)
    except ELFError as error:
        raise ValueError(f"cubin must be an ELF file, got {len(cubin)} bytes: {error}") from None
    if not kernels:
        raise ValueError(f"cubin must hold a kernel, got {len(cubin)} bytes without one")
    # The longest name first: one name may be the beginning of another.
    numbered = sorted(enumerate(kernels), key=lambda pair: -len(pair[1]))
    digest = hashlib.sha256()
    for name, size, data in sections:
        if not name or name.startswith(_NOT_CODE):
            continue
        for number, kernel in numbered:
            name = name.replace(kernel, f"kernel{number}")
        digest.update(f"{name} {size}\n".encode() + data)
    return digest.hexdigest()


def _read(cubin: bytes) -> tuple[list[str], list[tuple[str, int, bytes]]]:
    """The names of an ELF file's global functions, and its sections: name, size, content."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    elf = ELFFile(io.BytesIO(cubin))
    sections = list(elf.iter_sections())
    kernels = [
        symbol.name
        for table in sections
        if isinstance(table, SymbolTableSection)
        for symbol in table.iter_symbols()
        if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_info"]["bind"] == "STB_GLOBAL"
    ]
    parts = [
        (s.name, s["sh_size"], b"" if s["sh_type"] == "SHT_NOBITS" else s.data()) for s in sections
    ]
    return kernels, parts


def _nvdisasm() -> str:
    found = shutil.which("nvdisasm")
    if found is None:
        # The package nvidia-cuda-nvdisasm installs it into the folder nvidia/cu13/bin.
        for root in map(Path, sys.path):
            candidate = root / "nvidia" / "cu13" / "bin" / "nvdisasm"
            if candidate.is_file():
                return str(candidate)
        raise FileNotFoundError(
            "nvdisasm must be on the PATH or installed as the package nvidia-cuda-nvdisasm, "
            "got neither"
        )
    return found
