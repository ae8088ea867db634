"""The hardware comparison with stand-ins for the GPU: the models, a recording, faults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from sparse_mla_reference import minifloat
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs import present
from sparse_mla_verify.hardware import (
    arithmetic,
    command,
    families,
    hashing,
    instructions,
)
from sparse_mla_verify.hardware.comparison import (
    EXAMPLES,
    OUT_OF_TIME,
    Session,
    digest,
)
from sparse_mla_verify.hardware.record import (
    GROUPS,
    SYNTHETIC,
    Compared,
    Part,
    Record,
    families_of,
    load,
    names_of,
    shortcomings,
    tables_hash,
)
from sparse_mla_verify.hardware.sweeps import SWEEPS, expected_hash

H200 = Path(__file__).parents[3] / "reference" / "tests" / "data" / "mufu_hashes_h200.npz"
HOST = Host("2000-01-01", "no GPU: synthetic", 0, "sm_90", *["none"] * 7)
Fault = Callable[[str, np.ndarray], None]


class StandIn:
    """A device that gives what the models predict, and then plants a fault in it."""

    def __init__(
        self, fault: Fault = lambda name, words: None, heads: tuple[int, ...] = ()
    ) -> None:
        self.fault = fault
        self.heads = heads

    def host(self) -> Host:
        return HOST

    def prepare(self, name: str) -> str:
        return "no machine code: synthetic"

    def hashes(self, name: str) -> np.ndarray:
        found = np.zeros(hashing.HEADS, np.uint64)
        for head in self.heads:
            words = self.table(name, head).reshape(-1, hashing.BLOCK)
            found[head] = hashing.head_hash(np.array([hashing.block_hash(w) for w in words]))
        return found

    def table(self, name: str, head: int) -> np.ndarray:
        words = SWEEPS[name].expected(head)
        self.fault(name, words)
        return words

    def run(self, name: str, inputs: Any) -> np.ndarray:
        if name in arithmetic.OPERATIONS:
            with np.errstate(all="ignore"):
                words = np.array(arithmetic.OPERATIONS[name].model(*inputs)).view(np.uint32)
        else:
            words = instructions.predicted(name, inputs)
        self.fault(name, words)
        return words


class Silent:
    def start(self, part: str, total: int) -> None:
        pass

    def advance(self, part: str, amount: int = 1) -> None:
        pass


def compared(device, names, heads=(127,), budget=1e9):
    session = Session(device, names, Silent(), 1, budget, heads=heads, chunks=1)
    return {c.name: c for c in session.compare()}


# ---- hashes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    return np.random.default_rng(3).integers(0, 1 << 32, hashing.HEAD, dtype=np.uint32)


def hashed(words):
    return hashing.head_hash(
        np.array([hashing.block_hash(block) for block in words.reshape(-1, hashing.BLOCK)])
    )


def test_the_device_hashes_as_the_host_does(words):
    found = hashing.head_hashes(torch.from_numpy(words.view(np.int32)))
    assert found.numpy().view(np.uint64).tolist() == [hashed(words)]


@pytest.mark.parametrize("place", [0, 1, hashing.BLOCK, hashing.HEAD - 1])
def test_a_flipped_bit_and_an_exchange_change_the_hash(words, place):
    flipped = words.copy()
    flipped[place] ^= np.uint32(1 << 31)
    exchanged = words.copy()
    exchanged[[place, place - 5]] = words[[place - 5, place]]
    assert len({hashed(words), hashed(flipped), hashed(exchanged)}) == 3


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp", "rsqrt"])
def test_the_models_give_the_hashes_that_an_h200_gave(name):
    """One binade, zeros and subnormals, and NaN, of what the MUFU probe recorded."""
    recorded = np.load(H200)[f"{name}_ftz"]
    for head in (0, 127, 511):
        assert expected_hash(name, head) == int(recorded[head])


# ---- inputs -------------------------------------------------------------------------------------


def test_counts_are_enough():
    per_family = arithmetic.CHUNK * arithmetic.CHUNKS
    assert per_family * len(arithmetic.OPERAND_FAMILIES) >= 10**8
    per_family = instructions.PROBLEMS * instructions.CHUNKS * families.SIDE**2
    assert per_family * len(families.MATRIX_FAMILIES) >= 10**8
    assert min(len(arithmetic.OPERAND_FAMILIES), len(families.MATRIX_FAMILIES)) >= 8


def test_chunks_differ_and_repeat():
    for made in (
        [arithmetic.operands("close", i)[0] for i in (0, 0, 1)],
        [instructions.problems("SM90_F16", "spread", i)[0] for i in (0, 0, 1)],
    ):
        one, again, other = map(digest, made)
        assert one == again != other


@pytest.fixture(scope="module")
def results():
    """Model results of a chunk of every family, by instruction and family."""
    return {
        (name, family): instructions.expected(name, family, 0)
        for name in ("SM90_E4M3", "SM90_BF16")
        for family in families.MATRIX_FAMILIES
    }


def test_families_hold_what_their_names_say(results):
    form = minifloat.E4M3
    (a, _, c), _ = results["SM90_E4M3", "subnormals"]
    assert ((a & 0x7F) < 16).all()
    assert (np.abs(c) < 2.0**-126).mean() > 0.3
    (a, _, _), d = results["SM90_E4M3", "specials"]
    assert 0.001 < ((a & 0x7F) == form.nan).mean() < 0.01
    assert 0.1 < np.isnan(d.view(np.float32)).mean() < 0.6
    (a, _, c), d = results["SM90_E4M3", "zeros"]
    assert (a == 0x80).mean() > 0.3
    assert (d == 0).any()
    assert (c.view(np.uint32) == 0x80000000).mean() > 0.1
    _, d = results["SM90_BF16", "overflow"]
    assert 0.2 < np.isinf(d.view(np.float32)).mean() < 0.8
    (_, _, c), d = results["SM90_BF16", "cancelled-by-c"]
    assert np.median(np.abs(d.view(np.float32))) < 2.0**-18 * np.median(np.abs(c))
    (a, _, _), _ = results["SM90_BF16", "chained"]
    assert a.shape[-1] == 8 * instructions.STEP_BYTES


@pytest.mark.parametrize("name", ["SM90_E4M3", "SM90_BF16"])
def test_families_give_many_results_that_c_alone_does_not(results, name):
    for family in set(families.MATRIX_FAMILIES) - {"overflow", "zeros", "encodings"}:
        (_, _, c), d = results[name, family]
        assert (d == c.view(np.uint32)).mean() < 0.75, family


def test_families_upset_another_model(results):
    """A sum in float32, k in order, is told from the model by most families."""
    told = set()
    for family in families.MATRIX_FAMILIES:
        (a, b, c), d = results["SM90_E4M3", family]
        table = minifloat.value_table(minifloat.E4M3)
        total = c[:1].copy()
        with np.errstate(all="ignore"):
            for k in range(a.shape[-1]):
                total += table[a[:1, :, None, k]] * table[b[:1, None, :, k]]
        if (total.view(np.uint32) != d[:1]).mean() > 1e-4:
            told.add(family)
    assert len(told) >= 10


# ---- comparisons --------------------------------------------------------------------------------


def test_agreement_is_seen_in_every_group():
    names = ("rcp", "cvt_e4m3x2", "fma", "SM90_E4M3")
    found = compared(StandIn(heads=(127, 511)), names, heads=(127, 511))
    assert tuple(found) == names
    assert [c.mismatches for c in found.values()] == [0] * 4
    assert [c.errors for c in found.values()] == [()] * 4
    assert found["rcp"].inputs == 2 << 23
    assert found["fma"].inputs == 8 * arithmetic.CHUNK
    assert found["SM90_E4M3"].inputs == 14 * 16 * 128 * 128


def test_one_wrong_word_of_a_sweep_is_located():
    def fault(name, words):
        words[12345] ^= np.uint32(1)

    part = compared(StandIn(fault, heads=(127,)), ["ex2"])["ex2"].parts[0]
    assert (part.mismatches, part.located) == (1, True)
    bits = np.array([(127 << 23) + 12345], np.uint32)
    want = SWEEPS["ex2"].model(bits.view(np.float32))[0]
    example = part.examples[0]
    assert example.inputs == f"{bits[0]:08x}"
    assert (example.want, example.got) == (f"{want:08x}", f"{want ^ 1:08x}")


def test_a_sweep_wrong_in_many_heads_is_bounded_from_below():
    def fault(name, words):
        words[:100] ^= np.uint32(1)

    heads = tuple(range(120, 126))
    part = compared(StandIn(fault, heads=heads), ["rcp"], heads)["rcp"].parts[0]
    assert (part.mismatches, part.located) == (4 * 100 + 2, False)
    assert len(part.examples) == EXAMPLES


def test_exchanged_halves_of_a_pair_are_seen():
    def fault(name, words):
        words[:] = words >> np.uint32(16) | words << np.uint32(16)

    assert compared(StandIn(fault, heads=(120,)), ["cvt_e4m3x2"], (120,))["cvt_e4m3x2"].mismatches


def test_one_wrong_result_of_a_family_is_located():
    def fault(name, words):
        words.reshape(-1)[777] ^= np.uint32(1 << 31)

    found = compared(StandIn(fault), ["div", "SM90_E4M3"])
    assert found["div"].mismatches == len(arithmetic.OPERAND_FAMILIES)
    assert found["SM90_E4M3"].mismatches == len(families.MATRIX_FAMILIES)
    part = found["SM90_E4M3"].parts[0]
    (a, b, c), want = instructions.expected("SM90_E4M3", part.name, 0)
    row, column = divmod(777, 128)
    example = part.examples[0]
    assert example.want == f"{want[0, row, column]:08x}"
    assert a[0, row].tobytes().hex() in example.inputs
    assert b[0, column].tobytes().hex() in example.inputs
    assert f"c={c[0, row, column].view(np.uint32):08x}" in example.inputs
    assert example.inputs in found["SM90_E4M3"].first


def test_what_fails_says_so_and_the_rest_goes_on():
    class Broken(StandIn):
        def prepare(self, name):
            if name == "rcp":
                raise ValueError("does not compile")
            return super().prepare(name)

        def run(self, name, inputs):
            if np.isnan(inputs[0]).any():
                raise RuntimeError("launch failed")
            return super().run(name, inputs)

    found = compared(Broken(heads=(127,)), ["rcp", "rsqrt", "add"])
    assert "does not compile" in found["rcp"].errors[0]
    assert found["rcp"].inputs == 0
    assert (found["rsqrt"].errors, found["rsqrt"].mismatches) == ((), 0)
    assert {e.split(":")[0] for e in found["add"].errors} == {"uniform", "specials"}
    assert found["add"].inputs == 6 * arithmetic.CHUNK


def test_no_time_is_no_agreement():
    found = compared(StandIn(heads=(127,)), ["ex2", "mul"], budget=0.0)
    assert all(OUT_OF_TIME in e for c in found.values() for e in c.errors)
    assert [len(c.errors) for c in found.values()] == [1, 8]


def test_the_command_writes_a_record_of_what_it_could_not_compare(tmp_path):
    out = tmp_path / "record.json"
    options = command._parser().parse_args(
        ["--out", str(out), "--only", "mufu,mma", "--budget", "0", "--workers", "1"]
    )
    record = command._run(options, StandIn(), Console(quiet=True), "said")
    assert load(out) == record
    assert record.command == "said"
    assert tuple(c.name for c in record.compared) == names_of(("mufu", "mma"))
    assert all(OUT_OF_TIME in error for c in record.compared for error in c.errors)
    assert len(shortcomings(record, ("mufu", "mma"))) >= 2 * len(record.compared)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_command_says_that_it_needs_a_gpu(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "record.json")]) == 2
    assert capsys.readouterr().err == "hardware needs an NVIDIA GPU and PyTorch with CUDA\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_command_says_what_else_its_gpu_must_have(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(present, "gpu_name", lambda: "a GPU of another kind")
    assert command.main(["--out", str(tmp_path / "record.json")]) == 2
    assert "needs an sm_90 GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_unknown_group_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--out", "record.json", "--only", "mufu,sin"])
    assert "must be of mufu, convert, arithmetic, mma, got 'sin'" in capsys.readouterr().err


# ---- records ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record():
    """A record of the form of a complete one; it says nothing of a GPU."""

    def one(name):
        parts = families_of(name)
        inputs = -(-(1 << 32 if name in SWEEPS else 10**8) // len(parts))
        return Compared(name, "", "", "", "", 1.0, tuple(Part(p, inputs) for p in parts))

    return Record(SYNTHETIC, "", HOST, 1, 1.0, tuple(map(one, names_of(GROUPS))))


def with_part(record, **change):
    first = record.compared[0]
    parts = (replace(first.parts[0], **change), *first.parts[1:])
    return replace(record, compared=(replace(first, parts=parts), *record.compared[1:]))


def test_a_complete_record_has_no_shortcomings(record, tmp_path):
    assert shortcomings(record) == []
    record.save(tmp_path / "record.json")
    assert load(tmp_path / "record.json") == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": (1 << 32) - 1}, "results compared"),
        ({"mismatches": 1}, "1 mismatches"),
        ({"error": OUT_OF_TIME}, OUT_OF_TIME),
        ({"name": "some encodings"}, "families"),
    ],
)
def test_shortcomings_are_named(record, change, words):
    wrong = shortcomings(with_part(record, **change))
    assert wrong
    assert all("ex2" in line for line in wrong)
    assert words in wrong[0]


def test_a_missing_operation_is_a_shortcoming(record):
    assert shortcomings(replace(record, compared=record.compared[1:])) == ["ex2: not compared"]


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"schema": 1}')
    with pytest.raises(ValueError, match=r"must be a hardware comparison, got .*other\.json"):
        load(path)


def test_tables_hash_tells_models_apart():
    hashes = {name: tables_hash(name) for name in names_of(GROUPS)}
    assert {name for name, found in hashes.items() if not found} == set(arithmetic.OPERATIONS)
    assert hashes["SM90_F16"] == hashes["SM90_WGMMA_F16"]  # one model, two instructions
    distinct = set(hashes) - set(arithmetic.OPERATIONS) - {"SM90_WGMMA_F16"}
    assert len({hashes[name] for name in distinct}) == len(distinct)
