"""Fit the interpolator's integers to recorded results, and write `_mufu_tables.py`.

    python fit_mufu.py            # fit, compare with the module, exit 1 if they differ
    python fit_mufu.py --write    # fit and write the module

A segment's results T(r), r = 0 ... 2^w - 1, must satisfy

    T(r) * 2^15 <= a * 2^13 + b * r + c * sq(r) + rounding < (T(r) + 1) * 2^15

For a given (b, c) that is one interval of a * 2^13 + rounding: the largest of the lower bounds to
the smallest of the upper ones. b and c are searched around the Taylor coefficients, and the
rounding constant, which all segments of a function share, is the residue modulo 2^13 that lies in
an interval of every segment.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from sparse_mla_reference.mufu import truncating_square  # noqa: E402

DATA = HERE.parent / "tests" / "data"
MODULE = HERE.parent / "src" / "sparse_mla_reference" / "_mufu_tables.py"

Fit = tuple[int, int, int, int]  # b, c, and the interval of a * 2^13 + rounding


def ex2_table() -> np.ndarray:
    """int64 [2^23]: the recorded mantissas, 2^23 <= T < 2^24."""
    delta = np.load(DATA / "mufu_ex2_octave_h200.npz")["delta"].astype(np.int64)
    return np.rint(np.exp2(np.arange(1 << 23) / 2.0**23) * 2.0**23).astype(np.int64) + delta


def fit_segment(
    table: np.ndarray, square: np.ndarray, bs: range, cs: range, shift: int = 15
) -> list[Fit]:
    """All (b, c) of the ranges that reproduce the segment, each with its interval."""
    r = np.arange(table.size, dtype=np.int64)
    fits = []
    for c in cs:
        low = (table << shift) - c * square
        for b in bs:
            residue = low - b * r
            start, end = int(residue.max()), int(residue.min()) + (1 << shift) - 1
            if start <= end:
                fits.append((b, c, start, end))
    return fits


def shared_rounding(fits: list[list[Fit]]) -> tuple[int, list[tuple[int, int, int]]]:
    """The rounding constant that every segment allows, and (a, b, c) of each segment."""
    for rounding in range(1 << 13):
        chosen = []
        for segment in fits:
            for b, c, start, end in segment:
                a = -((rounding - start) >> 13)
                if start <= (a << 13) + rounding <= end:
                    chosen.append((a, b, c))
                    break
        if len(chosen) == len(fits):
            return rounding, chosen
    raise ValueError("no rounding constant serves all segments")


def fit_ex2() -> tuple[int, list[tuple[int, int, int]]]:
    """2^f: 64 segments; the slope is g ln 2 and half the curvature g ln(2)^2 / 2."""
    table = ex2_table().reshape(64, -1)
    square = truncating_square(17).astype(np.int64)
    fits = []
    for segment, values in enumerate(table):
        g = 2.0 ** (segment / 64)
        b, c = round(g * math.log(2) * 2**15), round(g * math.log(2) ** 2 / 2 * 2**11)
        fits.append(fit_segment(values, square, range(b - 4, b + 5), range(c - 4, c + 17)))
        if not fits[-1]:
            raise ValueError(f"EX2 segment {segment}: no integers near b = {b}, c = {c} fit")
    return shared_rounding(fits)


def render(fits: dict[str, tuple[int, list[tuple[int, int, int]]]]) -> str:
    """The text of `_mufu_tables.py`."""
    lines = [
        '"""Interpolator coefficients of `mufu`: (a, b, c) per segment. Written by fit_mufu.py."""',
        "",
        "# fmt: off",
    ]
    for name, (rounding, rows) in fits.items():
        lines += [f"{name}_ROUNDING = {rounding}", f"{name} = ("]
        text = [f"({a}, {b}, {c})," for a, b, c in rows]
        lines += ["    " + " ".join(text[i : i + 4]) for i in range(0, len(text), 4)]
        lines += [")"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit everything; write the module or compare with it."""
    parser = argparse.ArgumentParser(description="Fit the MUFU interpolator to recordings.")
    parser.add_argument("--write", action="store_true", help="write _mufu_tables.py")
    write = parser.parse_args().write
    fits = {}
    for name, fit in {"EX2": fit_ex2}.items():
        start = time.perf_counter()
        fits[name] = fit()
        print(f"{name}: {len(fits[name][1])} segments, {time.perf_counter() - start:.1f} s")
    text = render(fits)
    if write:
        MODULE.write_text(text)
    elif text != MODULE.read_text():
        raise SystemExit(f"{MODULE.name} differs from the fit")


if __name__ == "__main__":
    main()
