"""The process that imports a debug build: run cases on the GPU, keep their stages in a file.

`python -m sparse_mla_verify.stage_trace.kernel_run FOLDER TASKS`, by the command alone: the folder
holds the build, and the tasks are ``[case, schedule]`` pairs as JSON. It has an entry of its own
because the build must be imported instead of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.processes.patched_kernel import PACKAGE, Change, environment
from sparse_mla_verify.stage_trace.areas import NOT_STORED, STORED
from sparse_mla_verify.stage_trace.comparison import areas_of
from sparse_mla_verify.stage_trace.debug_build import debug_build
from sparse_mla_verify.stage_trace.small_cases import case_named

if TYPE_CHECKING:
    from sparse_mla_verify.inputs.cases import Case

TIMEOUT_S = 300
#: A case's name and a schedule's.
Task = tuple[str, str]


@dataclass(frozen=True, eq=False)
class KernelRun:
    """What a debug build gave.

    Attributes:
        host: The computer and the versions.
        machine_code: The hash of each build, by its signature.
        stages: The stages and outputs of each task, as ``comparison.reference_stages`` gives them.
    """

    host: dict[str, Any]
    machine_code: dict[str, str]
    stages: dict[Task, dict[str, NDArray[Any]]]


def run_debug_build(
    folder: Path, tasks: Sequence[Task], stages: Iterable[str], planted: Iterable[Change] = ()
) -> KernelRun:
    """Build in `folder`, run the tasks in a process of its own, read what it kept.

    Raises:
        RuntimeError: The process failed; its message is the process's.
        subprocess.TimeoutExpired: The process is not done in `TIMEOUT_S`.
    """
    variables = environment(debug_build(folder, stages, planted))
    # Several processes compile and one runs, through a cache that goes with the folder.
    variables.pop("SPARSE_MLA_CACHE", None)
    variables["SPARSE_MLA_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", __name__, str(folder), json.dumps(tasks)]
    done = subprocess.run(
        command, env=variables, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"the debug build failed:\n{done.stderr.strip()[-4000:]}")
    about = json.loads((folder / "run.json").read_text())
    found = {}
    for number, task in enumerate(tasks):
        with np.load(folder / f"{number}.npz") as arrays:
            found[task] = dict(arrays)
    return KernelRun(about["host"], about["machine_code"], found)


def main(folder: Path, tasks: Sequence[Task]) -> int:
    """What the process does."""
    import sparse_mla_kernel
    from sparse_mla_verify.gpu_runs import gpu
    from sparse_mla_verify.processes.workers import spread

    if not Path(sparse_mla_kernel.__file__).is_relative_to(folder):
        raise RuntimeError(f"{PACKAGE} is {sparse_mla_kernel.__file__}, not the debug build")
    cases = [case_named(*task) for task in tasks]
    list(spread(_precompile, [tuple(task) for task in tasks], min(len(tasks), 8)))
    machine_code = {}
    for number, case in enumerate(cases):
        inputs = gpu.Inputs(case)
        machine_code[case.signature.key] = inputs.kernel.artifact.code_sha256
        arrays: dict[str, Any] = _stages(case, inputs)
        np.savez(folder / f"{number}.npz", **arrays)
    about = {"host": asdict(gpu.host()), "machine_code": machine_code}
    (folder / "run.json").write_text(json.dumps(about))
    return 0


def _precompile(name: str, schedule: str) -> None:
    """Compile a task's kernel into the cache."""
    import torch

    from sparse_mla_kernel import precompile_sparse
    from sparse_mla_kernel.checks import architecture_of
    from sparse_mla_verify.gpu_runs.gpu import signature_arguments
    from sparse_mla_verify.inputs.schedules import kernel_schedule

    arch = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    sizes = signature_arguments(case_named(name, schedule).signature)
    if not precompile_sparse(*sizes, arch, schedule=kernel_schedule(schedule)):
        raise RuntimeError(f"the cache has not kept {name} on {schedule}")


def _stages(case: Case, inputs: Any) -> dict[str, NDArray[Any]]:
    """Launch once over memory that says "not stored" everywhere; what was stored and written."""
    import torch

    areas = areas_of(case)
    rows = case.batch * case.padded * 512 // 2  # words: two BF16 each
    memory = torch.full((rows + areas.words,), -1, dtype=torch.int32, device=inputs.device)
    shape = case.batch, case.padded, 512
    latent = memory[:rows].view(torch.bfloat16).reshape(shape)
    lse = torch.full(shape[:2], -1, dtype=torch.int32, device=inputs.device)
    inputs.launch(latent, lse)
    words = memory.cpu().numpy().view(np.uint32)
    own = np.s_[: case.batch, : case.heads]
    return {
        **areas.cut(words[rows:]),
        "lse": lse.cpu().numpy().view(np.uint32)[own],
        "latent": words[:rows].view(np.uint16).reshape(shape)[own],
    }


assert NOT_STORED == 0xFFFFFFFF  # the fill is -1
assert "latent" not in STORED

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [(name, on) for name, on in json.loads(sys.argv[2])]))
