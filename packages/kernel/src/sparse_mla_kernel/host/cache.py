"""Compiled kernels on disk, so that a process need not compile what an earlier one did.

An entry is a folder named by the SHA-256 of everything that the machine code and the host code
depend on (:func:`describe`). It holds the launcher as a TVM-FFI library, the PTX, the cubin, and a
manifest with the SHA-256 of each. Entries appear whole or not at all: they are written beside
their place and renamed into it. An entry that isn't what its manifest says is thrown away.

Loading one needs TVM-FFI and the DSL's runtime library, not the DSL's compiler, whose import takes
seconds; without a linker on the machine that wrote it, it needs that too.
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
    """A kernel out of the cache.

    Args:
        launch: Launches it: a TVM-FFI function.
        ptx: The PTX.
        cubin: The machine code; ``launch`` holds these bytes and no others.
    """

    launch: Callable[..., None]
    ptx: str
    cubin: bytes


def folder() -> Path | None:
    """Where entries lie, or None if the cache is off.

    ``$SPARSE_MLA_CACHE_DIR``, else ``$XDG_CACHE_HOME/sparse-mla``, else ``~/.cache/sparse-mla``.
    ``SPARSE_MLA_CACHE=0`` turns the cache off, as do ``off``, ``no`` and ``false``.

    Raises:
        ValueError: ``SPARSE_MLA_CACHE_DIR`` names the home folder of a user that is not there.
    """
    if os.environ.get("SPARSE_MLA_CACHE", "").lower() in ("0", "off", "no", "false"):
        return None
    if chosen := os.environ.get("SPARSE_MLA_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"SPARSE_MLA_CACHE_DIR is {chosen}; it may be a folder, or start with ~: {error}"
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
        kernel: Which entry point: ``"decode"``, ``"query_exchange"``, ``"push_decode"``,
            ``"owner_merge"`` or ``"step"``.
        arch: Architecture, such as ``"sm_90a"``.
        sizes: Static sizes and the schedule, by name.
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
    """The SHA-256 of :func:`describe`'s answer, in hex: the entry's name."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _digest_of_sources(root: Path = Path(__file__).parents[1]) -> str:
    """The SHA-256 of a package's Python files, whatever folder it lies in."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


#: Taken when the package is imported: what is in memory is what is compiled.
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
    """The machine that the launcher's host code is compiled for: the DSL uses all that it has."""
    features = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        features = next((ln for ln in file if ln.startswith(("flags", "Features"))), features)
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()
    return f"{sys.platform} {platform.machine()} {digest[:16]}"


def runtime_library() -> Path | None:
    """The DSL's runtime library, by the DSL's own rule, without importing the DSL.

    ``$CUTE_DSL_LIBS`` (which the DSL sets when it is imported), else the one of the newest CUDA
    that the driver supports.
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
    """``"cu13"`` for the DSL's own, the whole path for another."""
    if path is None:
        return None
    own = path.parents[2].name == "nvidia_cutlass_dsl" if len(path.parents) > 2 else False
    return path.parents[1].name if own else str(path)


# ---- reading ------------------------------------------------------------------------------------


def holds(inputs: Mapping[str, object]) -> bool:
    """Whether there is an entry of these inputs; it is neither checked nor loaded."""
    root = folder()
    return root is not None and (root / key(inputs) / _MANIFEST).is_file()


def find(inputs: Mapping[str, object]) -> Cached | None:
    """The kernel of these inputs, if an earlier process has kept it.

    An entry that is damaged, or can't be loaded here, is removed, with a warning.
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
    """Check an entry against its manifest and load it; any exception means that it's no good."""
    stated = json.loads(manifest)
    if stated["inputs"] != json.loads(json.dumps(inputs)):
        raise ValueError("its manifest is of another kernel")
    content = {}
    for name, digest in stated["files"].items():
        content[name] = (entry / name).read_bytes()
        if hashlib.sha256(content[name]).hexdigest() != digest:
            raise ValueError(f"{name} is not what was written")
    launcher = _LIBRARY if _LIBRARY in content else _OBJECT
    if content[_CUBIN] not in content[launcher]:
        raise ValueError(f"{launcher} holds another cubin")
    load = _load_library if launcher == _LIBRARY else _load_object
    return Cached(load(entry / launcher), content[_PTX].decode(), content[_CUBIN])


def _load_library(path: Path) -> Callable[..., None]:
    _open_runtime(runtime_library())
    function: Callable[..., None] = tvm_ffi.load_module(path)[FUNCTION]
    return function


@functools.cache
def _open_runtime(path: Path | None) -> ctypes.CDLL:
    """Load the DSL's runtime library; a launcher finds it by its name."""
    if path is None:
        raise FileNotFoundError(f"no {_RUNTIME} is installed")
    return ctypes.CDLL(str(path))


def _load_object(path: Path) -> Callable[..., None]:
    from cutlass.runtime import load_module

    function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
    return function


# ---- writing ------------------------------------------------------------------------------------


def keep(inputs: Mapping[str, object], launcher: bytes, ptx: str, cubin: bytes) -> bool:
    """Keep a compiled kernel for later processes; never fails the caller.

    Args:
        inputs: From :func:`describe`.
        launcher: An object file that exports ``FUNCTION`` and holds the cubin.
        ptx: The PTX.
        cubin: The machine code.

    Returns:
        Whether it is there now. Not if the cache is off, if it can't be written (with a warning),
        or if the sources have changed since this process read them.
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
                # Another process was quicker, and its entry is as good; or what lies there is none.
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
    """Rename an entry into its place.

    Raises:
        FileExistsError: The place is taken.
    """
    try:
        os.rename(entry, place)  # a folder replaces no folder that has files in it
    except OSError as error:
        if place.is_dir():
            raise FileExistsError(place) from error
        raise


def _remove(entry: Path) -> None:
    """Take an entry away in one step, then delete it; leave it where that isn't possible."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".old-", dir=entry.parent) as scratch,
    ):
        os.rename(entry, Path(scratch) / "entry")


def _link(source: Path, target: Path) -> bool:
    """Make a shared library of an object file, if the machine has a linker."""
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
