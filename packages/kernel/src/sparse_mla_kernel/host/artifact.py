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
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    try:
        elf = ELFFile(io.BytesIO(cubin))
    except ELFError as error:
        raise ValueError(f"cubin must be an ELF file, got {len(cubin)} bytes: {error}") from None
    tables = [s for s in elf.iter_sections() if isinstance(s, SymbolTableSection)]
    kernels = [
        symbol.name
        for table in tables
        for symbol in table.iter_symbols()
        if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_info"]["bind"] == "STB_GLOBAL"
    ]
    digest = hashlib.sha256()
    for section in elf.iter_sections():
        name = section.name
        if not name or name.startswith(_NOT_CODE):
            continue
        for number, kernel in enumerate(kernels):
            name = name.replace(kernel, f"kernel{number}")
        digest.update(f"{name} {section['sh_size']}\n".encode())
        if section["sh_type"] != "SHT_NOBITS":
            digest.update(section.data())
    return digest.hexdigest()


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
