from concurrent.futures import Future
from dataclasses import asdict, replace

import numpy as np

from sparse_mla_verify.evidence.guarded_recordings import GuardedRun, Layout, row_digests
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs import guarded
from sparse_mla_verify.inputs.guarded_cases import GIVEN, MAPPED, ROWS
from sparse_mla_verify.inputs.schedules import BASE

FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"
HOST = Host("2000-01-01", "GPU", 1, "sm_90", "x", "x", "x", "x", "4", "x", "x")


def done(value):
    future: Future[object] = Future()
    future.set_result(value)
    return future


def test_bits_that_differ_are_counted_and_a_fault_has_none(tmp_path):
    name = "guarded/16-heads"
    bits = np.full((3, 16, 512), 7, np.uint16), np.full((3, 16), 9, np.uint32)
    rows = [done((bits[0][r : r + 1], bits[1][r : r + 1])) for r in range(3)]
    runs = [GuardedRun(BASE, name, given, "key", "inputs") for given in GIVEN]
    layout = asdict(Layout(ROWS, MAPPED, 1, 1))
    (tmp_path / "0").mkdir()
    latent = bits[0].copy()
    latent[1, 2, 3] ^= 1
    np.savez(tmp_path / "0" / guarded._file_of(runs[0]), latent=latent, lse=bits[1])
    runs[1] = replace(runs[1], error=FAULT)
    found = {
        "host": asdict(HOST),
        "layout": layout,
        "machine_code": {"key": "aa"},
        "given_rows": [],
        "runs": list(map(asdict, runs)),
    }
    made = guarded._gathered([found], {(BASE, name): rows}, tmp_path)
    assert [(r.differing, r.elements, r.error) for r in made.runs] == [
        (1, 3 * 16 * 513, ""),
        (0, 0, FAULT),
    ]
    assert "[1, 2, 3]" in made.runs[0].first
    same = [a == b for a, b in zip(made.runs[0].digests, row_digests(bits), strict=True)]
    assert same == [True, False, True]
    other = found | {"layout": layout | {"before": 2}, "runs": []}
    (tmp_path / "0").rename(tmp_path / "1")
    both = guarded._gathered([other, found], {(BASE, name): rows}, tmp_path)
    assert both.layout.before == 1  # the least of what the processes reserved
