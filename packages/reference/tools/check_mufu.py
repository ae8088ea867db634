"""Compare the MUFU models with recorded hashes of all 2^32 inputs.

    python check_mufu.py [OPERATION ...] [--heads FIRST LAST] [--recording FILE]

Needs the package installed. Evaluates an operation's model on every encoding (2 to 5 minutes on
one core) and compares a hash of each run of 2^23 encodings, one sign and exponent (a "head", 0 to
511), with what `probe_mufu` recorded on the GPU. Prints progress; exits 1 on any difference. The
recording is that of an H200 unless --recording names another, a ``mufu_hashes_*.npz`` that
`probe_mufu` condensed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from probe_mufu import block_hashes, row_hashes

from sparse_mla_reference import mufu

RECORDING = Path(__file__).resolve().parent.parent / "tests" / "data" / "mufu_hashes_h200.npz"
_FUNCTIONS = (mufu.ex2, mufu.lg2, mufu.rcp, mufu.rsqrt, mufu.sqrt, mufu.exp)
MODELS: dict[str, Callable[[Any], Any]] = {
    function.__name__ + suffix: partial(function, ftz=bool(suffix))
    for suffix in ("_ftz", "")
    for function in _FUNCTIONS
}


def head_hash(operation: str, head: int) -> int:
    """Hash of the model's results for all 2^23 encodings of a sign and exponent."""
    encodings = np.arange(1 << 23, dtype=np.uint32) + np.uint32(head << 23)
    results = MODELS[operation](encodings.view(np.float32)).view(np.uint32)
    return int(row_hashes(block_hashes(results))[0])


def check(operation: str, heads: range, recording: Mapping[str, np.ndarray]) -> list[int]:
    """Those of the heads where the operation's model differs from the recording."""
    start, wrong = time.perf_counter(), []
    recorded = recording[operation]
    for count, head in enumerate(heads, 1):
        if head_hash(operation, head) != recorded[head]:
            wrong.append(head)
        if count % 64 == 0 or head == heads[-1]:
            took = time.perf_counter() - start
            done = f"{count << 23:,} inputs, {len(wrong)} heads wrong"
            print(f"{operation}: {done}, {took:.0f} s", flush=True)
    return wrong


def main() -> None:
    """Check the operations that the command line names, all of them by default."""
    parser = argparse.ArgumentParser(description="Check the MUFU models on all 2^32 inputs.")
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(MODELS))
    parser.add_argument("--heads", nargs=2, type=int, default=(0, 511), metavar=("FIRST", "LAST"))
    parser.add_argument("--recording", type=Path, default=RECORDING, metavar="FILE")
    args = parser.parse_args()
    unknown = set(args.operations) - set(MODELS)
    if unknown:
        parser.error(f"unknown operations {sorted(unknown)}; there are {', '.join(MODELS)}")
    heads = range(args.heads[0], args.heads[1] + 1)
    recording = np.load(args.recording)
    wrong = {op: check(op, heads, recording) for op in args.operations or MODELS}
    for operation, found in wrong.items():
        print(f"{operation}: {f'wrong in heads {found}' if found else 'no mismatch'}")
    raise SystemExit(any(wrong.values()))


if __name__ == "__main__":
    main()
