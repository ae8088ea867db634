"""A session per layer, the audit, lint and docs. `nox -l` lists them; `nox` runs the defaults."""

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
CONSTRAINTS = "constraints.txt"
# This version compiled the Triton example's recorded cubin. It is not in constraints.txt, because
# PyTorch's Linux wheels require another version and could then not be installed.
TRITON = "triton==3.6.0"


@dataclass(frozen=True)
class Package:
    """A package of the monorepo: its folder and what its tests need beside it."""

    path: str
    tests_need: tuple[str, ...]


PACKAGES = MappingProxyType(
    {
        "reference": Package("packages/reference", ("pytest", "pytest-xdist", "hypothesis")),
        "kernel": Package("packages/kernel", ("pytest", "pytest-xdist")),
        "verify": Package("packages/verify", ("pytest", "pytest-xdist", "hypothesis")),
    }
)
TYPED = ("packages", "examples", "docs", "conftest.py", "noxfile.py")

# Every matrix product of the reference is small: BLAS threads cost more than they give.
ONE_THREAD = MappingProxyType(
    dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
)
MOST_WORKERS = 8


def spread() -> tuple[str, ...]:
    """pytest's options for a process a core; none where tests would share a GPU."""
    if shutil.which("nvidia-smi"):
        return ()
    return ("-n", str(min(os.cpu_count() or 1, MOST_WORKERS)), "--dist", "worksteal")


def stack(session: nox.Session) -> str:
    """Make, once for the sessions that need them, an environment with all layers; its python.

    PyTorch and the DSL take most of a minute to install: one environment serves three sessions.
    The packages themselves are installed anew each time, so that none tests an older source.
    """
    home = ROOT / ".nox" / "stack"
    python = str(home / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    wanted = [need for package in PACKAGES.values() for need in package.tests_need]
    wanted += [package.path for package in PACKAGES.values()]
    pins = "".join((ROOT / p / "pyproject.toml").read_text() for p in wanted if "/" in p)
    key = hashlib.sha256(((ROOT / CONSTRAINTS).read_text() + pins).encode()).hexdigest()
    stamp = home / "key.txt"
    if not (stamp.exists() and stamp.read_text() == key):
        session.run(sys.executable, "-m", "venv", "--clear", str(home), external=True)
    session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *wanted, external=True)
    stamp.write_text(key)
    return python


def run_tests(session: nox.Session, python: str, layer: str) -> None:
    """Run a layer's tests over all cores; arguments after `--` go to pytest."""
    tests = f"{PACKAGES[layer].path}/tests"
    command = (python, "-m", "pytest", tests, *spread(), *session.posargs)
    session.run(*command, env=dict(ONE_THREAD), external=True)


@nox.session
def reference(session: nox.Session) -> None:
    """Test the reference, in an environment with neither PyTorch nor the DSL."""
    package = PACKAGES["reference"]
    session.install("-c", CONSTRAINTS, *package.tests_need, package.path)
    absent = "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'cutlass')))"
    session.run("python", "-c", absent)
    command = ("python", "-m", "pytest", f"{package.path}/tests", *spread(), *session.posargs)
    session.run(*command, env=dict(ONE_THREAD))


@nox.session(venv_backend="none")
def kernel(session: nox.Session) -> None:
    """Test the kernel: cross-compile it, check its PTX and SASS; run it where a GPU is."""
    run_tests(session, stack(session), "kernel")


@nox.session(venv_backend="none")
def verify(session: nox.Session) -> None:
    """Test the verify layer: comparators, cases, recordings; live tests where a GPU is."""
    run_tests(session, stack(session), "verify")


@nox.session(venv_backend="none", default=False)
def audit(session: nox.Session) -> None:
    """Audit every claim: on the GPU if there is one, else on the recordings; write a report.

    Arguments after `--` go to the audit, such as `--schedule low-latency`.
    """
    session.run(stack(session), "-m", "sparse_mla_verify", *session.posargs, external=True)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Time the kernel against its base schedule, FlashMLA and PyTorch; needs a GPU."""
    session.run(stack(session), "-m", "sparse_mla_verify", "bench", *session.posargs, external=True)


@nox.session(default=False)
def speed(session: nox.Session) -> None:
    """Time the reference: its decode and `mma`, beside MMA-Sim's on the same inputs."""
    path = PACKAGES["reference"].path
    session.install("-c", CONSTRAINTS, "mmasim", "torch", path)
    session.run("python", f"{path}/benchmarks/speed.py", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Test the worked examples: the models give the recorded bits, Triton the recorded cubin."""
    session.install("-c", CONSTRAINTS, "pytest", TRITON, PACKAGES["reference"].path)
    session.run("python", "-m", "pytest", "examples", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and types, also of tests, examples and tools."""
    typed = ("hypothesis", "jinja2", "markdown-it-py", "matplotlib", "ml-dtypes", "nox", "numpy")
    session.install("-c", CONSTRAINTS, "mypy", "pytest", "rich", "ruff", *typed)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *TYPED)


@nox.session
def docs(session: nox.Session) -> None:
    """Check that the documents' links lead somewhere and their examples run."""
    session.install("-c", CONSTRAINTS, "pytest", "markdown-it-py", PACKAGES["reference"].path)
    session.run(
        "python", "-m", "pytest", "docs", "README.md", "--doctest-glob=*.md", *session.posargs
    )
