"""Compiled kernels on disk, so that a process need not compile what an earlier one did.

An entry is a folder named by the SHA-256 of everything that the machine code and the host code
depend on (:func:`describe`). The folder holds the launcher as a TVM-FFI library, the PTX, the
cubin, and a manifest with the SHA-256 of each. An entry appears whole or not at all: it is written
beside its place and then renamed into it. An entry whose files are not what its manifest says is
removed.

To load an entry takes TVM-FFI and the DSL's runtime library. An entry that was written on a
computer without a linker holds an object file instead of a library, and to load that takes the DSL
too, whose import lasts seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import tvm_ffi

#: The name that a launcher is exported by.
FUNCTION = "run"
_FORMAT = 1
_MANIFEST, _PTX, _CUBIN = "manifest.json", "kernel.ptx", "kernel.cubin"
_LIBRARY, _OBJECT = "launcher.so", "launcher.o"
_RUNTIME = "libcute_dsl_runtime.so"
_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
_LINKERS = ("ld", "ld.lld", "cc", "gcc", "clang")


class Cached(NamedTuple):
    """A kernel that was read from the cache.

    Args:
        launch: Launches the kernel: a TVM-FFI function.
        ptx: The PTX.
        cubin: The machine code, which is the one that ``launch`` holds.
    """

    launch: Callable[..., None]
    ptx: str
    cubin: bytes


def folder() -> Path | None:
    """The folder that entries lie in, or None if the cache is off or there is no home folder.

    ``$SPARSE_MLA_CACHE_DIR``, else ``$XDG_CACHE_HOME/sparse-mla``, else ``~/.cache/sparse-mla``.
    ``SPARSE_MLA_CACHE=0`` turns the cache off, as do ``off``, ``no`` and ``false``.

    Raises:
        ValueError: ``SPARSE_MLA_CACHE_DIR`` names the home folder of a user that does not exist.
    """
    if os.environ.get("SPARSE_MLA_CACHE", "").lower() in ("0", "off", "no", "false"):
        return None
    if chosen := os.environ.get("SPARSE_MLA_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(
                "SPARSE_MLA_CACHE_DIR must be a folder, or start with ~ or an existing ~user, "
                f"got {chosen}"
            ) from None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    return Path(home) / "sparse-mla"


# ---- what an entry depends on -------------------------------------------------------------------


def describe(kernel: str, arch: str, sizes: Mapping[str, object]) -> dict[str, object]:
    """Everything that a compiled kernel depends on, as JSON.

    Args:
        kernel: The entry point: ``"decode"``, ``"query_exchange"``, ``"push_decode"``,
            ``"owner_merge"`` or ``"step"``.
        arch: The architecture, such as ``"sm_90a"``.
        sizes: The static sizes and the schedule, by name.
    """
    return {
        "format": _FORMAT,
        "kernel": kernel,
        "arch": arch,
        "sizes": dict(sizes),
        "sources": SOURCES,
        "versions": _versions(),
        "runtime": _runtime_name(runtime_library()),
        "host": _host(),
        "options": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("CUTE_DSL_") and name != "CUTE_DSL_LIBS"  # that is "runtime"
        },
    }


def key(inputs: Mapping[str, object]) -> str:
    """The name of an entry: the SHA-256, in hex, of what :func:`describe` returned."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _digest_of_sources(root: Path = Path(__file__).parents[1]) -> str:
    """The SHA-256 of a package's Python files; it does not depend on where the package lies."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


#: The digest at import, because the kernels are compiled from the sources as they were imported.
SOURCES = _digest_of_sources()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def _host() -> str:
    """The system and its CPU's features: the DSL compiles host code for all of the features."""
    features = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        features = next((ln for ln in file if ln.startswith(("flags", "Features"))), features)
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()
    return f"{sys.platform} {platform.machine()} {digest[:16]}"


def runtime_library() -> Path | None:
    """The path of the DSL's runtime library, found by the DSL's own rule without importing the DSL.

    The library is the one in ``$CUTE_DSL_LIBS``, which the DSL sets when it is imported, or else
    the installed one for the newest CUDA version that the driver supports. None if there is none.
    """
    for chosen in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        if chosen.endswith(_RUNTIME):
            return Path(chosen)
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    found = {}
    for root in map(Path, roots):
        for path in root.glob(f"cu*/lib/{_RUNTIME}"):
            found[int(path.parent.parent.name.removeprefix("cu"))] = path
    driver = _driver_cuda_major()
    usable = [major for major in found if driver is None or major <= driver]
    return found[max(usable)] if usable else None


@functools.cache
def _driver_cuda_major() -> int | None:
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def _runtime_name(path: Path | None) -> str | None:
    """A name for a runtime library: ``"cu13"`` for the DSL's own one, the path for another one."""
    if path is None:
        return None
    own = path.parents[2].name == "nvidia_cutlass_dsl" if len(path.parents) > 2 else False
    return path.parents[1].name if own else str(path)


# ---- reading ------------------------------------------------------------------------------------


def holds(inputs: Mapping[str, object]) -> bool:
    """Whether these inputs have an entry. The entry is neither checked nor loaded."""
    root = folder()
    return root is not None and (root / key(inputs) / _MANIFEST).is_file()


def find(inputs: Mapping[str, object]) -> Cached | None:
    """The kernel of these inputs if the cache has it, and else None.

    An entry that is damaged, or that can't be loaded on this computer, is removed with a warning.
    """
    root = folder()
    if root is None:
        return None
    entry = root / key(inputs)
    try:
        manifest = (entry / _MANIFEST).read_bytes()
    except OSError:
        return None
    try:
        return _load(entry, manifest, inputs)
    except Exception as error:
        warnings.warn(
            f"{entry} is damaged ({error}); the kernel is compiled again",
            RuntimeWarning,
            stacklevel=2,
        )
        _remove(entry)
        return None


def _load(entry: Path, manifest: bytes, inputs: Mapping[str, object]) -> Cached:
    """Check an entry against its manifest and load it; raise an exception if it is damaged."""
    stated = json.loads(manifest)
    if stated["inputs"] != json.loads(json.dumps(inputs)):
        raise ValueError("manifest.json must be of this kernel, got another kernel's")
    content = {}
    for name, digest in stated["files"].items():
        content[name] = (entry / name).read_bytes()
        if hashlib.sha256(content[name]).hexdigest() != digest:
            raise ValueError(f"{name} must have the SHA-256 that the manifest states, got another")
    launcher = _LIBRARY if _LIBRARY in content else _OBJECT
    if content[_CUBIN] not in content[launcher]:
        raise ValueError(f"{launcher} must hold {_CUBIN}, got a launcher without it")
    load = _load_library if launcher == _LIBRARY else _load_object
    return Cached(load(entry / launcher), content[_PTX].decode(), content[_CUBIN])


def _load_library(path: Path) -> Callable[..., None]:
    _open_runtime(runtime_library())
    function: Callable[..., None] = tvm_ffi.load_module(path)[FUNCTION]
    return function


@functools.cache
def _open_runtime(path: Path | None) -> ctypes.CDLL:
    """Load the DSL's runtime library, so that a launcher's library finds it by its name."""
    if path is None:
        raise FileNotFoundError(f"{_RUNTIME} must be installed, got none")
    return ctypes.CDLL(str(path))


def _load_object(path: Path) -> Callable[..., None]:
    from cutlass.runtime import load_module

    function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
    return function


# ---- writing ------------------------------------------------------------------------------------


def keep(inputs: Mapping[str, object], launcher: bytes, ptx: str, cubin: bytes) -> bool:
    """Keep a compiled kernel for later processes. A failure to write is a warning, not an error.

    Args:
        inputs: From :func:`describe`.
        launcher: An object file that exports ``FUNCTION`` and holds the cubin.
        ptx: The PTX.
        cubin: The machine code.

    Returns:
        Whether the cache has the kernel now. It does not if the cache is off, if the cache can't be
        written, if the launcher does not hold the cubin, or if the sources have changed since this
        process imported them.
    """
    root = folder()
    if root is None or cubin not in launcher or _digest_of_sources() != inputs["sources"]:
        return False
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as scratch:
            entry = Path(scratch) / "entry"
            entry.mkdir()
            _write(entry, inputs, launcher, ptx, cubin)
            try:
                _publish(entry, root / key(inputs))
            except FileExistsError:
                # Either another process has published this entry, which is as good, or a folder
                # without a manifest is in the way.
                if not holds(inputs):
                    _remove(root / key(inputs))
                    with contextlib.suppress(FileExistsError):
                        _publish(entry, root / key(inputs))
    except OSError as error:
        warnings.warn(
            f"a compiled kernel can't be kept in {root} ({error}); the next process compiles it "
            "again",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return holds(inputs)


def _write(
    entry: Path, inputs: Mapping[str, object], launcher: bytes, ptx: str, cubin: bytes
) -> None:
    (entry / _OBJECT).write_bytes(launcher)
    (entry / _PTX).write_text(ptx, encoding="utf-8")
    (entry / _CUBIN).write_bytes(cubin)
    if _link(entry / _OBJECT, entry / _LIBRARY):
        (entry / _OBJECT).unlink()
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(entry.iterdir())
    }
    (entry / _MANIFEST).write_text(json.dumps({"inputs": inputs, "files": files}, indent=1))


def _publish(entry: Path, place: Path) -> None:
    """Rename an entry's folder to ``place``.

    Raises:
        FileExistsError: There is a folder with files at ``place``.
        OSError: The folder can't be renamed for another reason.
    """
    try:
        os.rename(entry, place)  # fails if place is a folder with files in it
    except OSError as error:
        if place.is_dir():
            raise FileExistsError(place) from error
        raise


def _remove(entry: Path) -> None:
    """Rename an entry out of the way, then delete it. An entry that can't be renamed stays."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".old-", dir=entry.parent) as scratch,
    ):
        os.rename(entry, Path(scratch) / "entry")


def _link(source: Path, target: Path) -> bool:
    """Link an object file into a shared library; False if no linker is here or linking fails."""
    runtime = runtime_library()
    tool = next(filter(None, map(shutil.which, _LINKERS)), None)
    if tool is None or runtime is None:
        return False
    needs = [str(runtime), str(tvm_ffi.libinfo.find_libtvm_ffi())]
    command = [tool, "-shared", "-nostdlib", "-o", str(target), str(source), *needs]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        target.unlink(missing_ok=True)
    return done.returncode == 0
