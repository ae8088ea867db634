"""Fit the interpolators' integers to recorded results, and write `_mufu_tables.py`.

    python fit_mufu.py            # fit, compare with the module, exit 1 if they differ
    python fit_mufu.py --write    # fit and write the module

Needs the package installed; takes half a minute on one core. The form (shifts, segments) is
`mufu.Quadratic`'s; the integers come from the recordings in ``tests/data`` alone. Each recorded
result bounds the sum before its low bits were dropped:

    lo(r) <= a 2^a_shift + b r + c sq(r) 2^c_shift + rounding <= hi(r)

For a given (b, c) a segment's bounds leave one interval for a 2^a_shift + rounding, from the
largest lower to the smallest upper one. b and c are searched around the parabola through the
segment's ends and middle. The rounding constant, which a function's segments share, is the
smallest that every interval allows with an `a` of 26 bits. Each segment turns out to have exactly
one (b, c); the fit fails if one has none or several.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from probe_mufu import unpack

from sparse_mla_reference import mufu

PACKAGE = Path(__file__).resolve().parent.parent
DATA = PACKAGE / "tests" / "data"
MODULE = PACKAGE / "src" / "sparse_mla_reference" / "instructions" / "_mufu_tables.py"

Bounds = tuple[np.ndarray, np.ndarray]  # int64 [arguments]: the sum's least and greatest value
Interval = tuple[int, int, int, int]  # b, c, least and greatest a 2^a_shift + rounding
SEARCH_B, SEARCH_C = 8, 12
FREE = 1 << 45  # bound of an argument whose result bypasses the interpolator


@dataclass(frozen=True)
class Target:
    """A function to fit: its form, the recorded bounds, and the function itself."""

    form: mufu.Quadratic
    bounds: Callable[[int], Bounds]  # of the form's shift
    value: Callable[[float], float]  # argument / 2^23 -> result in units of its last place


def recorded(name: str, exponent: int) -> np.ndarray:
    """int64 [2^23]: the recorded encodings of one binade."""
    return unpack(np.load(DATA / f"mufu_{name}_h200.npz")[f"exponent_{exponent}"]).astype(np.int64)


def truncated(results: np.ndarray, shift: int) -> Bounds:
    """Bounds of a sum whose bits below 2^shift are dropped."""
    return results << shift, (results + 1 << shift) - 1


def significands(encodings: np.ndarray, last_place: int) -> np.ndarray:
    """float32 encodings as integers in units of 2^last_place."""
    significand = (encodings & 0x7FFFFF) | 1 << 23
    return significand << ((encodings >> 23) - 127 - 23 - last_place)


def ex2_bounds(shift: int) -> Bounds:
    """From the octave's differences from the rounded 2^f."""
    delta = np.load(DATA / "mufu_ex2_octave_h200.npz")["delta"].astype(np.int64)
    nearest = np.rint(np.exp2(np.arange(1 << 23) / 2.0**23) * 2.0**23).astype(np.int64)
    return truncated(nearest + delta, shift)


def rcp_bounds(shift: int) -> Bounds:
    """From 1 / m."""
    return truncated(significands(recorded("rcp", 0), -24), shift)


def rsqrt_bounds(shift: int) -> Bounds:
    """From 1 / sqrt(m) over two octaves; rsqrt(1) = 1 bypasses the interpolator."""
    octaves = [significands(recorded("rsqrt", e), -24) for e in (0, 1)]
    low, high = truncated(np.concatenate(octaves), shift)
    low[0], high[0] = -FREE, FREE
    return low, high


def sqrt_bounds(shift: int) -> Bounds:
    """From sqrt(m) over two octaves."""
    octaves = [significands(recorded("sqrt", e), -23) for e in (0, 1)]
    return truncated(np.concatenate(octaves), shift)


def lg2_bounds(shift: int) -> Bounds:
    """From log2 m: a result of k leading zeros shows k more of the sum's low bits.

    The sum has 36 bits behind the point and `shift` dropped ones; lg2(1) = 0 bypasses it.
    """
    encodings = recorded("lg2", 0)
    encodings[0] = encodings[1]
    significand = (encodings & 0x7FFFFF) | 1 << 23
    place = (encodings >> 23) - 127 - 23 + 36  # of the last bit; negative: trailing zeros
    whole = significand << np.maximum(place, 0) >> np.maximum(-place, 0)
    low, high = whole << shift, (whole + (1 << np.maximum(place, 0)) << shift) - 1
    low[0], high[0] = -FREE, FREE
    return low, high


def two_octaves(f: float) -> float:
    """The significand in [1, 4] of an argument f = argument / 2^23 in [0, 2]."""
    return 1 + f if f < 1 else 2 * f


TARGETS = {
    "EX2": Target(mufu.EX2, ex2_bounds, lambda f: 2.0 ** (f + 23)),
    "LG2": Target(mufu.LG2, lg2_bounds, lambda f: 2.0**36 * math.log2(1 + f)),
    "RCP": Target(mufu.RCP, rcp_bounds, lambda f: 2.0**24 / (1 + f)),
    "RSQRT": Target(mufu.RSQRT, rsqrt_bounds, lambda f: 2.0**24 / math.sqrt(two_octaves(f))),
    "SQRT": Target(mufu.SQRT, sqrt_bounds, lambda f: 2.0**23 * math.sqrt(two_octaves(f))),
}


def guess(target: Target, segment: int) -> tuple[int, int]:
    """b and c of the parabola through the function at the segment's start, middle and end."""
    form, width = target.form, 1 << target.form.offset_bits
    start, middle, end = (target.value((segment + t) * width / 2.0**23) for t in (0, 0.5, 1))
    curvature = 2 * (start - 2 * middle + end) / width**2
    slope = (end - start) / width - curvature * width
    square = 2.0 ** (2 * (17 - form.offset_bits) - 19 + form.c_shift)  # sq(r) 2^c_shift over r^2
    return round(slope * 2**form.shift), round(curvature * 2**form.shift / square)


def fit_segment(target: Target, segment: int, low: np.ndarray, high: np.ndarray) -> Interval:
    """The one (b, c) near the guess that reproduces the segment, and its interval."""
    form = target.form
    r = np.arange(low.size, dtype=np.int64)
    square = mufu.truncating_square()[:: 1 << (17 - form.offset_bits)].astype(np.int64)
    sparse = np.append(np.arange(0, r.size, 251), r.size - 1)  # rules most pairs out
    near_b, near_c = guess(target, segment)
    found = []
    for c in range(near_c - SEARCH_C, near_c + SEARCH_C + 1):
        curve = c * square << form.c_shift
        for b in range(near_b - SEARCH_B, near_b + SEARCH_B + 1):
            for chosen in (sparse, slice(None)):
                line = curve[chosen] + b * r[chosen]
                start, end = int((low[chosen] - line).max()), int((high[chosen] - line).min())
                if start > end:
                    break
            else:
                found.append((b, c, start, end))
    if len(found) != 1:
        raise ValueError(f"segment {segment}: {len(found)} fits near b = {near_b}, c = {near_c}")
    return found[0]


def shared_rounding(intervals: list[Interval], a_shift: int) -> tuple[int, list[list[int]]]:
    """The smallest rounding constant that every segment allows, and its (a, b, c) rows."""
    for rounding in range(1 << a_shift + 1):
        rows = [[end - rounding >> a_shift, b, c] for b, c, _, end in intervals]
        held = [
            start <= (row[0] << a_shift) + rounding and 0 <= row[0] < 1 << 26
            for row, (_, _, start, _) in zip(rows, intervals, strict=True)
        ]
        if all(held):
            return rounding, rows
    raise ValueError("no rounding constant serves all segments with an a of 26 bits")


def fit(target: Target) -> tuple[int, list[list[int]]]:
    """Rounding constant and (a, b, c) of every segment."""
    low, high = target.bounds(target.form.shift)
    rows = low.size >> target.form.offset_bits
    pairs = enumerate(zip(low.reshape(rows, -1), high.reshape(rows, -1), strict=True))
    intervals = [fit_segment(target, segment, *bounds) for segment, bounds in pairs]
    return shared_rounding(intervals, target.form.a_shift)


def render(fits: dict[str, tuple[int, list[list[int]]]]) -> str:
    """The text of `_mufu_tables.py`."""
    lines = [
        '"""Coefficients (a, b, c) per segment of `mufu.Quadratic`. Written by fit_mufu.py."""',
        "",
        "# fmt: off",
    ]
    for name, (rounding, rows) in fits.items():
        lines += [f"{name}_ROUNDING = {rounding}", f"{name} = ("]
        text = [f"({a}, {b}, {c})," for a, b, c in rows]
        lines += ["    " + " ".join(text[i : i + 3]) for i in range(0, len(text), 3)]
        lines += [")"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit everything; write the module or compare with it."""
    parser = argparse.ArgumentParser(description="Fit the MUFU interpolators to recordings.")
    parser.add_argument("--write", action="store_true", help="write _mufu_tables.py")
    write = parser.parse_args().write
    fits = {}
    for name, target in TARGETS.items():
        start = time.perf_counter()
        fits[name] = fit(target)
        took = time.perf_counter() - start
        print(f"{name}: {len(fits[name][1])} segments, {took:.1f} s", flush=True)
    text = render(fits)
    if write:
        MODULE.write_text(text)
    elif text != MODULE.read_text():
        raise SystemExit(f"{MODULE.name} differs from the fit")


if __name__ == "__main__":
    main()
