"""The broken variants, as far as a machine without a GPU goes: patched, compiled, other code."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparse_mla_reference import BASE, CONTRACT, decode, e4m3
from sparse_mla_verify.__main__ import main
from sparse_mla_verify.black_box import identify as i
from sparse_mla_verify.black_box.adapters import load
from sparse_mla_verify.models.counterfactuals import BY_NAME
from sparse_mla_verify.planted import variants
from sparse_mla_verify.planted.variants import VARIANTS, patched

# Compiles the package in each folder in turn: PyTorch and the DSL are loaded once for all of them.
COMPILE = """
import sys
for folder in sys.argv[1:]:
    for name in [n for n in sys.modules if n.split(".")[0] == "sparse_mla_kernel"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import sparse_mla_kernel
    assert sparse_mla_kernel.__file__.startswith(folder), sparse_mla_kernel.__file__
    print(sparse_mla_kernel.cross_compile(4, 16, 128, 64, 4, "sm_90a").code_sha256)
    sys.path.remove(folder)
"""


def compiled(*folders):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.compiler
def test_every_variant_compiles_to_other_code(tmp_path):
    kernel = pytest.importorskip("sparse_mla_kernel")
    ours = Path(kernel.__file__).parents[1]
    folders = []
    for k, variant in enumerate(VARIANTS):
        (tmp_path / str(k)).mkdir()
        folders.append(patched(variant, tmp_path / str(k)))
    first, *others, last = compiled(ours, *folders, ours)
    assert first == last  # what was compiled in between changes nothing
    assert len(set(others)) == len(VARIANTS)
    assert first not in others


def test_a_line_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="line to patch once, got 0"):
        patched(replace(VARIANTS[0], old="no such line"), tmp_path)


def test_there_are_variants_of_counterfactuals():
    named = [v for v in VARIANTS if v.counterfactual]
    assert len(named) >= 4
    assert {v.counterfactual for v in named} <= BY_NAME.keys()
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)


def cut(p, machine):
    """P cut to three fraction bits before the conversion, as the patched kernel does it."""
    bits = p.view(np.uint32) & np.uint32(0xFFF00000)
    return e4m3.encode(bits.view(np.float32))


def masked(query, kv, rows, valid, **scales):
    return decode(query, kv, rows, valid, **scales, steps=replace(CONTRACT, quantise=cut))


def too_few(query, kv, rows, valid, **scales):
    """One key less in each part of four."""
    rows, valid = rows.copy(), valid.copy()
    for row, count in zip(rows, valid, strict=True):
        for part in BASE.parts(int(count)):
            if part.stop > part.start:
                row[part.stop - 1] = -1
    return load("sparse_mla_verify.black_box.adapters:reference")(query, kv, rows, valid, **scales)


@pytest.mark.parametrize(
    ("kernel", "questions", "name"),
    [
        (
            masked,
            (i.lse_base, i.logits, i.accumulation, i.numerators),
            "P truncated to E4M3's three fraction bits",
        ),
        (too_few, (i.lse_base, i.keys_counted), "one key too few"),
    ],
)
def test_models_of_variants_are_named(kernel, questions, name):
    question, answer = next(v.finding for v in VARIANTS if v.name == name)
    found = {f.question: f.answer for f in i.identify(kernel, questions)}
    assert found[question] == answer


def test_the_usage_shows_that_a_folder_is_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["variants"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: sparse-mla-audit variants [-h] --out OUT [--jobs JOBS]\n" in printed
    assert "the following arguments are required: --out" in printed


def test_a_process_of_its_own_judges_the_variant_that_is_named(monkeypatch, capsys):
    monkeypatch.setattr(variants, "judge", lambda variant: {"judged": variant.name})
    assert main(["variants", variants.JUDGE, VARIANTS[1].name]) == 0
    assert json.loads(capsys.readouterr().out) == {"judged": VARIANTS[1].name}
