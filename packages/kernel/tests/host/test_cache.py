"""The cache on disk: what its key covers, and what becomes of a damaged entry."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_mla_kernel
from sparse_mla_kernel import BASE, LOW_LATENCY, MailboxLayout, compile_step, precompile_sparse
from sparse_mla_kernel.host import build, cache
from sparse_mla_kernel.host import compile as compile_module

SIZES: dict[str, Any] = {"batch": 2, "heads": 16, "padded": 32, "width": 8, "cap": 3, "push": None}
SIZES |= {"schedule": asdict(BASE)}


def inputs(**change: object) -> dict[str, Any]:
    return cache.describe("decode", "sm_90a", SIZES | change)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- the key ------------------------------------------------------------------------------------


def test_the_same_inputs_have_the_same_key() -> None:
    backwards = cache.describe("decode", "sm_90a", dict(reversed(SIZES.items())))
    assert cache.key(inputs()) == cache.key(backwards)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 3},
        {"heads": 32},
        {"padded": 48},
        {"width": 16},
        {"cap": 4},
        {"push": (8, 2, 3)},
        {"schedule": asdict(LOW_LATENCY)},
        *({"schedule": asdict(BASE) | {name: 9}} for name in asdict(BASE)),
    ],
)
def test_every_size_and_the_schedule_are_in_the_key(change: dict[str, Any]) -> None:
    assert cache.key(inputs(**change)) != cache.key(inputs())


def test_the_entry_point_and_the_architecture_are_in_the_key() -> None:
    keys = {
        cache.key(cache.describe(kernel, arch, SIZES))
        for kernel in ("decode", "query_exchange", "owner_merge", "step")
        for arch in ("sm_90a", "sm_100a")
    }
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SOURCES", "another"),
        ("_versions", lambda: {"nvidia-cutlass-dsl": "0"}),
        ("_host", lambda: "another"),
        ("runtime_library", lambda: Path("/opt/libcute_dsl_runtime.so")),
        ("runtime_library", lambda: None),
    ],
)
def test_what_compiles_is_in_the_key(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache.key(inputs())
    monkeypatch.setattr(cache, name, value)
    assert cache.key(inputs()) != before


def test_the_dsls_settings_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key(inputs())
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cache.key(inputs()) != before


def test_versions_are_those_installed() -> None:
    found = cache._versions()
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"} <= set(found)


def test_every_package_that_compiles_or_launches_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"version of {name}")
    names = {"nvidia-cutlass-dsl", "apache-tvm-ffi"} | {
        f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")
    }
    assert cache._versions.__wrapped__() == {name: f"version of {name}" for name in names}


@pytest.mark.parametrize("name", ["ptx/math.py", "kernels/low_latency/decode.py"])
def test_any_byte_of_the_sources_counts(name: str, tmp_path: Path) -> None:
    package = Path(sparse_mla_kernel.__file__).parent
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert cache._digest_of_sources(copy) == cache._digest_of_sources(package) == cache.SOURCES
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n")
    changed = cache._digest_of_sources(copy)
    assert changed != cache.SOURCES
    (copy / name).rename(copy / "renamed.py")
    assert cache._digest_of_sources(copy) not in (changed, cache.SOURCES)


def test_the_runtime_library_is_the_one_that_the_dsl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass.runtime import find_runtime_libraries

    dsl = Path(find_runtime_libraries(enable_tvm_ffi=False)[0]).resolve()
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    found = cache.runtime_library()
    assert found is not None
    assert found.resolve() == dsl
    monkeypatch.setenv("CUTE_DSL_LIBS", "/opt/libcute_dsl_runtime.so")
    assert cache.runtime_library() == Path("/opt/libcute_dsl_runtime.so")


def test_where_entries_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPARSE_MLA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == tmp_path / ".cache" / "sparse-mla"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/sparse-mla")
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", "~/here")
    assert cache.folder() == tmp_path / "here"
    for off in ("0", "off", "no", "False", "OFF"):
        monkeypatch.setenv("SPARSE_MLA_CACHE", off)
        assert cache.folder() is None
    monkeypatch.setenv("SPARSE_MLA_CACHE", "1")
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", "~no-such-user/cache")
    says = (
        r"^SPARSE_MLA_CACHE_DIR must be a folder, or start with ~ or an existing ~user, "
        r"got ~no-such-user/cache$"
    )
    with pytest.raises(ValueError, match=says):
        cache.folder()


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("SPARSE_MLA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/sparse-mla")


def test_only_the_dsls_settings_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """``CUTE_DSL_LIBS`` is in the key as the runtime library that it names."""
    monkeypatch.setattr(cache, "runtime_library", lambda: None)
    before = inputs()
    monkeypatch.setenv("CUTE_DSL_LIBS", "/opt/libcute_dsl_runtime.so")
    monkeypatch.setenv("CUTE_OTHER", "1")
    assert inputs() == before
    assert set(before) == {
        *("format", "kernel", "arch", "sizes", "sources", "versions", "runtime", "host", "options")
    }
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert inputs()["options"] == before["options"] | {"CUTE_DSL_LINEINFO": "1"}


@pytest.mark.parametrize(
    ("driver", "found"), [(None, "cu13"), (14, "cu13"), (13, "cu13"), (12, "cu12"), (11, None)]
)
def test_the_runtime_library_is_the_newest_that_the_driver_supports(
    driver: int | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "nvidia_cutlass_dsl"
    for name in ("cu12", "cu13"):
        (root / name / "lib").mkdir(parents=True)
        (root / name / "lib" / "libcute_dsl_runtime.so").write_bytes(b"")
    spec = SimpleNamespace(submodule_search_locations=[str(root)])
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", {"nvidia_cutlass_dsl": spec}.get)
    monkeypatch.setattr(cache, "_driver_cuda_major", lambda: driver)
    path = cache.runtime_library()
    assert path == (None if found is None else root / found / "lib" / "libcute_dsl_runtime.so")
    assert cache._runtime_name(path) == found
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cache.runtime_library() is None


def test_the_name_of_another_runtime_library() -> None:
    for path in ("/opt/cu13/lib/libcute_dsl_runtime.so", "/libcute_dsl_runtime.so", "x.so"):
        assert cache._runtime_name(Path(path)) == path


def test_other_libraries_in_the_dsls_setting_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = os.pathsep.join(("/opt/libother.so", "/opt/libcute_dsl_runtime.so"))
    monkeypatch.setenv("CUTE_DSL_LIBS", both)
    assert cache.runtime_library() == Path("/opt/libcute_dsl_runtime.so")


@pytest.mark.parametrize(
    ("answer", "major"), [((0, 13000), 13), ((0, 12999), 12), ((1, 13020), None), (None, None)]
)
def test_the_cuda_version_of_the_driver(
    answer: tuple[int, int] | None, major: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str) -> SimpleNamespace:
        assert name == "libcuda.so.1"
        if answer is None:
            raise OSError("no driver")

        def version(out: Any) -> int:
            out._obj.value = answer[1]
            return answer[0]

        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(ctypes, "CDLL", library)
    assert cache._driver_cuda_major.__wrapped__() == major


def test_the_host_is_told_apart_by_its_cpus_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(cpuinfo: str | None) -> str:
        def opened(path: str, **_: object) -> io.StringIO:
            assert path == "/proc/cpuinfo"
            if cpuinfo is None:
                raise OSError
            return io.StringIO(cpuinfo)

        monkeypatch.setattr(cache, "open", opened, raising=False)
        return cache._host.__wrapped__()

    x86 = host("model name\t: x\nflags\t\t: avx2 fma\nflags\t\t: sse\n")
    assert x86.startswith(f"{sys.platform} {platform.machine()} ")
    assert x86 == host("flags\t\t: fma avx2\n")  # in any order
    others = {x86, host("flags\t\t: avx2 fma avx512f\n"), host("Features\t: asimd\n"), host("")}
    assert len(others) == 4
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert host(None) == host("")
    assert host(None) not in others


# ---- keeping and finding ------------------------------------------------------------------------


def refused(launch: Callable[..., None]) -> str:
    """The error of a launcher that is given None for tensors: the launcher runs, no kernel does."""
    with pytest.raises(TypeError) as caught:
        launch(None, None, None, None, None, None, 1.0, 1.0)
    return str(caught.value)


@pytest.mark.parametrize("linkers", [cache._LINKERS, ()], ids=["linked", "no linker"])
def test_what_is_kept_is_found(
    linkers: tuple[str, ...], root: Path, built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LINKERS", linkers)
    assert cache.find(inputs()) is None
    assert built.keep(inputs())
    found = cache.find(inputs())
    assert found is not None
    assert (found.ptx, found.cubin) == (built.ptx, built.cubin)
    assert "mQuery: Tensor([3, 32, 576], uint8)" in refused(found.launch)
    assert cache.find(inputs(batch=3)) is None
    names = {path.name for path in (root / cache.key(inputs())).iterdir()}
    linked = bool(linkers) and any(map(shutil.which, linkers))
    assert ("launcher.so" in names) is linked
    assert [path.name for path in root.iterdir()] == [cache.key(inputs())]


@pytest.mark.skipif(not any(map(shutil.which, cache._LINKERS)), reason="needs a linker")
def test_a_warm_process_does_without_the_dsl(root: Path, built: Any) -> None:
    assert built.keep(inputs())
    script = (
        "import json, sys; from sparse_mla_kernel.host import cache\n"
        "found = cache.find(json.loads(sys.argv[1]))\n"
        "print(type(found.launch).__name__, 'cutlass' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, json.dumps(inputs())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Function", "False"]


@pytest.mark.parametrize("linker", ["ld", "ld.lld", "cc", "gcc", "clang"])
def test_any_linker_will_do(linker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that is installed links the launcher to the DSL's runtime and to TVM-FFI."""
    commands: list[list[str]] = []

    def run(command: list[str], **given: object) -> SimpleNamespace:
        assert given == {"capture_output": True, "check": False}
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(shutil, "which", {linker: f"/usr/bin/{linker}"}.get)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cache, "runtime_library", lambda: Path("/dsl/runtime.so"))
    assert cache._link(tmp_path / "a.o", tmp_path / "a.so")
    tool, shared, alone, out, target, source, *needs = commands[0]
    assert tool == f"/usr/bin/{linker}"
    assert [shared, alone, out, target] == ["-shared", "-nostdlib", "-o", str(tmp_path / "a.so")]
    assert source == str(tmp_path / "a.o")
    assert needs[0] == "/dsl/runtime.so"
    assert Path(needs[1]).name.startswith("libtvm_ffi")
    monkeypatch.setattr(cache, "runtime_library", lambda: None)
    assert not cache._link(tmp_path / "a.o", tmp_path / "a.so")


def test_a_linker_that_fails(root: Path, built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry then holds the object file, as on a computer without a linker."""
    monkeypatch.setattr(cache, "_LINKERS", ("no-such-linker", "false"))
    assert built.keep(inputs())
    names = {path.name for path in (root / cache.key(inputs())).iterdir()}
    assert names == {"launcher.o", "kernel.ptx", "kernel.cubin", "manifest.json"}


def test_the_folder_is_its_owners_alone(root: Path, built: Any) -> None:
    """Entries hold code that is run."""
    assert not root.parent.joinpath("cache").exists()
    assert built.keep(inputs())
    assert root.stat().st_mode & 0o777 == 0o700
    assert cache.holds(inputs())
    assert not cache.holds(inputs(batch=3))


def test_the_folders_above_are_made(
    tmp_path: Path, built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert built.keep(inputs())
    assert cache.holds(inputs())


def test_off(root: Path, built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built.keep(inputs())
    monkeypatch.setenv("SPARSE_MLA_CACHE", "0")
    assert cache.find(inputs()) is None
    assert not built.keep(inputs(batch=3))
    assert not cache.holds(inputs())
    assert len(list(root.iterdir())) == 1


def overwrite(path: Path, content: bytes | bytearray) -> None:
    """Write a new file: the old one may be loaded, and a change to it would crash the process."""
    path.unlink()
    path.write_bytes(content)


def truncate(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    overwrite(path, content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("which", ["launcher.*", "kernel.ptx", "kernel.cubin"])
def test_a_damaged_entry_is_removed(
    which: str, damage: Callable[[Path], None], root: Path, built: Any
) -> None:
    assert built.keep(inputs())
    entry = root / cache.key(inputs())
    damage(next(entry.glob(which)))
    with pytest.warns(RuntimeWarning, match="is damaged .* the kernel is compiled again"):
        assert cache.find(inputs()) is None
    assert list(root.iterdir()) == []
    assert built.keep(inputs())
    assert cache.find(inputs()) is not None


@pytest.mark.parametrize("content", ["", "{}", '{"inputs": {}, "files": {}}', "[]"])
def test_a_damaged_manifest(content: str, root: Path, built: Any) -> None:
    assert built.keep(inputs())
    (root / cache.key(inputs()) / "manifest.json").write_text(content)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert cache.find(inputs()) is None


def test_an_entry_without_a_manifest_is_replaced(root: Path, built: Any) -> None:
    assert built.keep(inputs())
    (root / cache.key(inputs()) / "manifest.json").unlink()
    assert cache.find(inputs()) is None
    assert built.keep(inputs())
    assert cache.find(inputs()) is not None


def test_a_launcher_of_another_cubin(root: Path, built: Any) -> None:
    """An entry is refused where every hash is right but the launcher holds another cubin.

    A recording names the hash of the cubin, so that this cubin has to be the one that runs.
    """
    other = b"\x7fELF" + bytes(1000)
    assert not cache.keep(inputs(), built.launcher, built.ptx, other)
    assert built.keep(inputs())
    entry = root / cache.key(inputs())
    stated = json.loads((entry / "manifest.json").read_text())
    (entry / "kernel.cubin").write_bytes(other)
    stated["files"]["kernel.cubin"] = hashlib.sha256(other).hexdigest()
    (entry / "manifest.json").write_text(json.dumps(stated))
    says = (
        r"damaged \(launcher\.\w+ must hold kernel\.cubin, got a launcher without it\); the kernel"
    )
    with pytest.warns(RuntimeWarning, match=says):
        assert cache.find(inputs()) is None


def test_sources_changed_since_they_were_read(
    root: Path, built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the sources in memory is not kept under the key of the edited ones on disk."""
    before = inputs()
    monkeypatch.setattr(cache, "_digest_of_sources", lambda: "edited")
    assert not built.keep(before)
    assert not root.exists()


def test_a_folder_that_cannot_be_written(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache.find(inputs()) is None
    with pytest.warns(RuntimeWarning, match="can't be kept in .*; the next process compiles it"):
        assert not built.keep(inputs())


def test_writers_and_readers_at_once(root: Path, built: Any) -> None:
    """Every writer succeeds, no reader sees a part, nothing is left over."""

    def write_and_read(number: int) -> bool:
        found = cache.find(inputs())
        assert found is None or found.cubin == built.cubin
        return bool(built.keep(inputs()))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(32)))
    assert [path.name for path in root.iterdir()] == [cache.key(inputs())]
    assert cache.find(inputs()) is not None


# ---- compiling through it -----------------------------------------------------------------------


@pytest.fixture
def cross(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile for sm_90a, whatever computer this is; the names of what is compiled."""
    compiled: list[str] = []
    compile_entry = build.compile_entry

    def counted(function: Any, arguments: Any, arch: str) -> Any:
        compiled.append(arch)
        return compile_entry(function, arguments, arch)

    monkeypatch.setattr(build, "compile_entry", counted)
    monkeypatch.setattr(compile_module, "architecture_of", lambda _: "sm_90a")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return compiled


def compile_small() -> sparse_mla_kernel.CompiledSparse:
    compile_module._compile_loaded.cache_clear()
    return sparse_mla_kernel.compile_sparse(2, 16, 32, 8, 3, "cuda:0")


def test_a_kernel_is_compiled_once(root: Path, cross: list[str], built: Any) -> None:
    first, second = compile_small(), compile_small()
    assert cross == ["sm_90a"]
    assert first.artifact == second.artifact
    assert first.artifact.cubin == built.cubin
    assert "mQuery: Tensor([3, 32, 576], uint8)" in refused(second.launch)


def test_a_damaged_kernel_is_compiled_again(root: Path, cross: list[str], built: Any) -> None:
    compile_small()
    flip(next(root.glob("*/launcher.*")))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        again = compile_small()
    assert cross == ["sm_90a"] * 2
    assert again.artifact.cubin == built.cubin
    assert compile_small().artifact.cubin == built.cubin
    assert len(cross) == 2


def test_a_kernel_is_compiled_beforehand(
    root: Path, cross: list[str], built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is compiled once, into the entry that `compile_sparse` finds."""
    sizes = (2, 16, 32, 8, 3, "sm_90a")
    assert precompile_sparse(*sizes)
    assert precompile_sparse(*sizes)
    assert compile_small().artifact.cubin == built.cubin
    assert cross == ["sm_90a"]
    monkeypatch.setenv("SPARSE_MLA_CACHE", "0")
    assert not precompile_sparse(*sizes)
    assert cross == ["sm_90a"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 24}, "heads must be a positive multiple of 16, got 24"),
        ({"cap": 1}, "cap must be at least batch, 2, got 1"),
        ({"arch": "sm_80"}, "arch must be sm_90a, .*, got 'sm_80'"),
        ({"schedule": "base"}, "schedule must be a sparse_mla_kernel.Schedule, got builtins.str"),
        ({"push": (8, 1, 3)}, "push must give owner_heads x ranks = heads, 16, got 8"),
    ],
)
def test_what_cannot_be_compiled_beforehand(change: dict[str, Any], says: str, root: Path) -> None:
    sizes: dict[str, Any] = {"batch": 2, "heads": 16, "padded": 32, "width": 8, "cap": 3}
    sizes["arch"] = "sm_90a"
    with pytest.raises((TypeError, ValueError), match=f"^{says}$"):
        precompile_sparse(**sizes | change)
    assert not root.exists()


def test_each_kernel_of_a_step_has_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(given: dict[str, Any]) -> cache.Cached:
        asked.append(given)
        return cache.Cached(lambda *_: None, "", given["kernel"].encode())

    monkeypatch.setattr(compile_module, "architecture_of", lambda _: "sm_90a")
    monkeypatch.setattr(cache, "find", find)
    compile_step.cache_clear()
    for box in (MailboxLayout(32, 8, 2, 3), MailboxLayout(32, 16, 1, 3)):
        step = compile_step(2, 8, box, torch.device("cuda", 0))
        assert {name: it.cubin for name, it in step.artifacts.items()} == {
            name: name.encode() for name in ("query_exchange", "push_decode", "owner_merge")
        }
    compile_step.cache_clear()
    assert [given["kernel"] for given in asked] == [
        "query_exchange",
        "push_decode",
        "owner_merge",
        "step",
    ] * 2
    assert len(set(map(cache.key, asked))) == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_kept_kernel_gives_the_compiled_ones_bits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 32, 576, generator=generator).to(torch.float8_e4m3fn).cuda()
    kv = torch.randn(100, 576, generator=generator).to(torch.float8_e4m3fn).cuda()
    rows = torch.randint(100, (2, 64), generator=generator, dtype=torch.int32).cuda()
    valid = torch.tensor([64, 17], dtype=torch.int32).cuda()
    results, kernels = [], []
    for off in ("0", "", ""):
        monkeypatch.setenv("SPARSE_MLA_CACHE", off)
        compile_module._compile_loaded.cache_clear()
        kernel = sparse_mla_kernel.compile_sparse(2, 32, 32, 64, 2, "cuda")
        latent = torch.full((2, 32, 512), float("nan"), dtype=torch.bfloat16).cuda()
        lse = torch.full((2, 32), float("nan")).cuda()
        sparse_mla_kernel.run_sparse(kernel, query, kv, rows, valid, latent, lse, 0.06, 1.0)
        results.append((latent.view(torch.int16), lse.view(torch.int32)))
        kernels.append(kernel)
    assert not results[0][1].view(torch.float32).isnan().any()
    for latent, lse in results[1:]:
        assert torch.equal(latent, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert len({kernel.artifact.code_sha256 for kernel in kernels}) == 1
    assert len(list(root.iterdir())) == 1
