"""Run the kernel on a GPU, compare with the model, keep a recording and a full dump.

``python -m examples`` calls this; it needs PyTorch, Triton and an sm_90 GPU.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.recording import Recording, Rows, host_facts
from examples.triton_decode import model
from examples.triton_decode.cases import HEADS, WIDTH, Case, cases

STAGES = ("logits", "p", "alpha", "sum", "total", "top")


def record(folder: Path) -> int:
    """Write ``recording.*`` and ``full.npz`` to the folder; return how many outputs differ."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    recording, differing = Recording(), 0
    full: dict[str, Any] = {}
    recording.facts["host"] = host_facts()
    for case in cases():
        runs = [launch(case, poison) for poison in (0xFF, 0x00)]
        (rows, cubin, _), (again, _, _) = runs
        traced, _, trace = launch(case, 0xFF, traced=True)
        full |= {f"{case.name}/latent": rows.latent, f"{case.name}/lse": rows.lse}
        full[f"{case.name}/trace"] = trace
        predicted = Rows.of(*predict(case))
        latent, lse = rows.differing(predicted)
        print(
            f"triton {case.name}: latent {latent} of {rows.latent.size} differ, "
            f"lse {lse} of {rows.lse.size}; second run {again.differing(rows)}, "
            f"traced kernel {traced.differing(rows)}, stages {stages_differing(case, trace)}"
        )
        differing += latent + lse + sum(again.differing(rows))
        recording.facts["cubin_sha256"] = hashlib.sha256(cubin).hexdigest()
        recording.add(case.name, rows, case.digest(), differing_latent=latent, differing_lse=lse)
        recording.save(folder)
        np.savez_compressed(folder / "full.npz", **full)
        (folder / "kernel.cubin").write_bytes(cubin)
    return differing


def predict(case: Case) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The model's answer to a case."""
    return model.decode_attention(
        case.query, case.kv, case.rows, case.valid, case.scale_log2, case.out_scale
    )


def launch(
    case: Case, poison: int, traced: bool = False
) -> tuple[Rows, bytes, NDArray[np.uint32] | None]:
    """Run the kernel with outputs full of a byte: the outputs, the cubin, the trace's encodings."""
    import torch

    from examples.triton_decode import kernel

    def fp8(array: NDArray[np.uint8]) -> Any:
        return torch.from_numpy(array).cuda().view(torch.float8_e4m3fn)

    def output(*shape: int) -> Any:
        return torch.full(shape, poison, dtype=torch.uint8, device="cuda")

    batch, block = len(case.query), kernel.BLOCK
    latent = output(batch, HEADS, 2 * kernel.LATENT).view(torch.bfloat16)
    lse = output(batch, HEADS, 4).view(torch.float32)[..., 0]
    trace = None
    if traced:
        trace = output(batch, HEADS, WIDTH // block, 4 * (2 * block + 4)).view(torch.float32)
    compiled = kernel.decode_attention[(HEADS // kernel.HEAD_GROUP, batch)](
        fp8(case.query),
        fp8(case.kv),
        torch.from_numpy(case.rows).cuda(),
        torch.from_numpy(case.valid).cuda(),
        latent,
        lse,
        trace,
        float(case.scale_log2),
        float(case.out_scale),
        HEADS=HEADS,
        WIDTH=WIDTH,
        BLOCK=block,
        num_warps=kernel.NUM_WARPS,
        num_stages=kernel.NUM_STAGES,
    )
    torch.cuda.synchronize()
    rows = Rows(
        latent.view(torch.int16).cpu().numpy().view(np.uint16),
        lse.contiguous().view(torch.int32).cpu().numpy().view(np.uint32),
    )
    encodings = None
    if trace is not None:
        encodings = trace.view(torch.int32).cpu().numpy().view(np.uint32)
    return rows, compiled.asm["cubin"], encodings


def stages_differing(case: Case, trace: NDArray[np.uint32] | None) -> dict[str, int]:
    """Elements of each stage's trace that differ from the model's."""
    assert trace is not None
    counts = dict.fromkeys(STAGES, 0)
    for b, (q, row, n) in enumerate(zip(case.query, case.rows, case.valid, strict=True)):
        for i, state in enumerate(model.blocks(q, case.kv[row[:n]], case.scale_log2)):
            seen = stage_views(trace[b, :, i])
            for name, encodings in seen.items():
                expected = np.ascontiguousarray(getattr(state, name)).view(np.uint32)
                counts[name] += int(np.count_nonzero(encodings != expected))
    return counts


def stage_views(block: NDArray[np.uint32]) -> dict[str, NDArray[np.uint32]]:
    """A block's trace [H, 2 * 64 + 4] by stage."""
    n = model.BLOCK
    views = {"logits": block[:, :n], "p": block[:, n : 2 * n]}
    return views | {name: block[:, 2 * n + i] for i, name in enumerate(STAGES[2:])}
