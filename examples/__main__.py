"""Run both examples on a GPU: ``python -m examples --out DIR``."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from examples.flashmla import record as flashmla
from examples.triton_decode import record as triton_decode

LIBRARY = "_flashmla_C.abi3.so"


def main() -> int:
    """Exit 0 if every output is as predicted, 1 if some differ, 2 if an example didn't run."""
    parser = argparse.ArgumentParser(prog="python -m examples", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    folder = os.environ.get("FLASHMLA_DIR")
    parser.add_argument(
        "--flashmla",
        type=Path,
        default=Path(folder) / LIBRARY if folder else None,
        help=f"{LIBRARY}, from vLLM's wheel (default: in $FLASHMLA_DIR)",
    )
    args = parser.parse_args()
    codes = [run("triton_decode", args.out, triton_decode.record)]
    if args.flashmla is None:
        print("flashmla: not run, neither --flashmla nor FLASHMLA_DIR says where it is")
        codes.append(2)
    else:
        codes.append(run("flashmla", args.out, lambda out: flashmla.record(out, args.flashmla)))
    return max(codes)


def run(name: str, out: Path, record: Callable[[Path], int]) -> int:
    """Run one example and say what came of it; an error doesn't stop the other one."""
    start = time.monotonic()
    (out / name).mkdir(parents=True, exist_ok=True)
    try:
        differing = record(out / name)
    except Exception:  # whatever it was, what is saved so far and the other example are wanted
        traceback.print_exc()
        return 2
    print(f"{name}: {differing} differences, {time.monotonic() - start:.1f} s", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
