"""Run FlashMLA on a GPU, compare with the model, keep a recording and a full dump.

``python -m examples`` calls this; it needs PyTorch, an H100 or H200, and FlashMLA's library.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.flashmla import model
from examples.flashmla.cases import PAGE_ROWS, TOKEN_BYTES, Case, cases
from examples.recording import Recording, Rows, host_facts

# Enough keys to tell every variant apart, in one split.
VARIANT_CASE, VARIANT_ROW = "blocks", 0


def record(folder: Path, library: Path) -> int:
    """Write ``recording.*`` and ``full.npz`` to the folder; return how many outputs differ.

    Args:
        folder: where to.
        library: ``_flashmla_C.abi3.so``, as vLLM's wheel has it.
    """
    import torch

    torch.ops.load_library(str(library))
    recording, differing = Recording(), 0
    full: dict[str, Any] = {}
    recording.facts["host"] = host_facts()
    recording.facts["library_sha256"] = hashlib.sha256(library.read_bytes()).hexdigest()
    for case in cases():
        rows, metadata, splits = launch(case)
        again, _, _ = launch(case)
        kept = Rows(rows.latent[list(case.kept)], rows.lse[list(case.kept)])
        full |= {f"{case.name}/latent": kept.latent, f"{case.name}/lse": kept.lse}
        full |= {f"{case.name}/metadata": metadata, f"{case.name}/num_splits": splits}
        np.savez_compressed(folder / "full.npz", **full)
        latent, lse = kept.differing(predict(case, metadata))
        print(
            f"flashmla {case.name}: latent {latent} of {kept.latent.size} differ, "
            f"lse {lse} of {kept.lse.size}; second run {again.differing(rows)}; splits "
            f"{[model.splits_of(metadata, case.blocks, row) for row in case.kept]}"
        )
        differing += latent + lse + sum(again.differing(rows))
        recording.add(case.name, kept, case.digest(), differing_latent=latent, differing_lse=lse)
        recording.arrays[f"{case.name}/metadata"] = metadata
        if case.name == VARIANT_CASE:
            counts = variants(case, kept, metadata)
            recording.facts["variants"] = counts
            for name, count in counts.items():
                print(f"  variant {name}: {count}")
        recording.save(folder)
    return differing


def predict(case: Case, metadata: NDArray[np.int32]) -> Rows:
    """The model's answer for the rows that a case keeps."""
    pairs = [
        model.decode_row(
            case.query[row],
            case.tokens(row),
            model.splits_of(metadata, case.blocks, row),
            case.softmax_scale,
        )
        for row in case.kept
    ]
    latent, lse = zip(*pairs, strict=True)
    return Rows.of(np.stack(latent), np.stack(lse))


def variants(case: Case, kept: Rows, metadata: NDArray[np.int32]) -> dict[str, dict[str, int]]:
    """For every variant, how many outputs of one row it predicts."""
    row = case.kept[VARIANT_ROW]
    splits = model.splits_of(metadata, case.blocks, row)
    seen = Rows(kept.latent[[VARIANT_ROW]], kept.lse[[VARIANT_ROW]])
    counts = {}
    for name, how in {"as the SASS reads": model.SASS, **model.VARIANTS}.items():
        latent, lse = model.decode_row(
            case.query[row], case.tokens(row), splits, case.softmax_scale, how
        )
        bad_latent, bad_lse = seen.differing(Rows.of(latent[None], lse[None]))
        counts[name] = {
            "latent": seen.latent.size - bad_latent,
            "of_latent": seen.latent.size,
            "lse": seen.lse.size - bad_lse,
            "of_lse": seen.lse.size,
        }
    return counts


def launch(case: Case) -> tuple[Rows, NDArray[np.int32], NDArray[np.int32]]:
    """Call the operator: outputs, its scheduler's table [parts, 8], the rows' first splits."""
    import torch

    query = torch.from_numpy(case.query.view(np.int16)).cuda().view(torch.bfloat16)
    cache = torch.from_numpy(case.cache).cuda().view(-1, PAGE_ROWS, 1, TOKEN_BYTES)
    ids = torch.from_numpy(case.ids).cuda()
    out, lse, metadata, splits = torch.ops._flashmla_C.sparse_decode_fwd(
        query[:, None],  # [B, 1, 64, 576]
        cache,
        ids[:, None],  # [B, 1, width]
        *(None,) * 7,  # lengths, sink, table, splits, and three for a second cache
        model.LATENT,
        case.softmax_scale,
        None,
    )
    torch.cuda.synchronize()
    rows = Rows(
        _bits(out[:, 0], torch.int16, np.uint16), _bits(lse[..., 0], torch.int32, np.uint32)
    )
    return rows, metadata.cpu().numpy(), splits.cpu().numpy()


def _bits(tensor: Any, integer: Any, dtype: Any) -> NDArray[Any]:
    return np.asarray(tensor.contiguous().view(integer).cpu().numpy().view(dtype))
