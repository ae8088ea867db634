import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import decode
from sparse_mla_verify.black_box import identify as i
from sparse_mla_verify.black_box import probe_cases
from sparse_mla_verify.black_box.adapters import call, load
from sparse_mla_verify.models.counterfactuals import CATALOGUE

ADAPTERS = "sparse_mla_verify.black_box.adapters:"
PRECISION = (i.lse_base, i.logits, i.accumulation, i.numerators)
TWICE = "BF16, rounded before the V scale and after it"

OURS = {
    "LSE base": "natural",
    "keys counted": "all",
    "empty row": "LSE -inf, row 0",
    "logits": "FP32, or 16 bits at least",
    "accumulation of QK": "25 bits below the largest term",
    "P's format": "E4M3",
    "P's scale": "448",
    "P's rounding": "to nearest",
    "what is summed": "P before its rounding",
    "P's max": "max of the part's keys so far",
    "split of 1024 keys": "4 parts, consecutive, chunks of 64",
    "partials": "FP32",
    "output": "BF16, rounded once, to nearest",
    "run to run": "the same bits",
    "row alone and in a batch of 64": "the same bits",
    **{f"id {name}": "is masked" for name in ("-1", "N", "2^31 - 1", "-2^31")},
}


def answers(kernel, questions=i.QUESTIONS):
    return {f.question: f.answer for f in i.identify(kernel, questions)}


def test_our_conventions_are_found():
    assert answers(load(ADAPTERS + "reference")) == OURS


@pytest.mark.slow
def test_the_other_schedules_split_is_found():
    found = answers(load(ADAPTERS + "reference_low_latency"), (*PRECISION, i.division))
    assert found["split of 1024 keys"] == "4 parts, dealt in runs of 8, chunks of 64"
    assert found["P's max"] == OURS["P's max"]


def test_plain_pytorch_is_found():
    pytest.importorskip("torch")
    found = answers(load(ADAPTERS + "pytorch"))
    assert found["logits"] == "BF16"
    assert found["P's format"] == "BF16"
    assert found["P's scale"] == "normalised"
    assert found["split of 1024 keys"] == "undetermined: only a coarse P shows it"
    assert found["partials"] == "undetermined: FP32, or there are no parts"
    assert found["id -1"] == "is masked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "questions", "want"),
    [
        ("p-bf16", PRECISION, {"P's format": "BF16", "P's scale": "448"}),
        ("p-fp32", PRECISION, {"P's format": "FP32"}),
        ("p-e5m2", PRECISION, {"P's format": "E5M2"}),
        ("p-rz", PRECISION, {"P's format": "E4M3", "P's rounding": "toward zero"}),
        ("p-scale-1", PRECISION, {"P's scale": "1"}),
        ("p-scale-240", PRECISION, {"P's scale": "240"}),
        ("p-scale-256", PRECISION, {"P's scale": "256"}),
        ("p-scale-447", PRECISION, {"P's scale": "447"}),
        ("sum-quantised", PRECISION, {"what is summed": "P after its rounding"}),
        ("mma-13-bits", PRECISION, {"accumulation of QK": "13 bits below the largest term"}),
        ("p-max-row", (*PRECISION, i.division), {"P's max": "max of the row's keys"}),
        ("p-max-cta", (*PRECISION, i.division), {"P's max": "max of the part's keys"}),
        ("partials-bf16", (i.partials,), {"partials": "BF16"}),
        ("out-twice", (i.out_rounding,), {"output": TWICE}),
        ("out-rz", (i.out_rounding,), {"output": "BF16, truncated"}),
        ("lse-base-2", (i.lse_base,), {"LSE base": "base 2"}),
        ("empty-inf", (i.empty_row,), {"empty row": "LSE inf, row 0"}),
        ("empty-finite", (i.empty_row,), {"empty row": "LSE -1e+30, row 0"}),
        ("empty-nan", (i.empty_row,), {"empty row": "LSE -inf, row NaN"}),
        ("ids-clamped", (i.invalid_ids,), dict.fromkeys(["id -1", "id N"], "attends to row 0")),
        (
            "split-filling",
            (i.dependence,),
            {
                "row alone and in a batch of 64": "other bits: "
                "its split or tiles depend on the batch"
            },
        ),
    ],
)  # fmt: skip
def test_a_counterfactual_is_named(name, questions, want):
    assert name in {c.name for c in CATALOGUE}
    found = answers(load(f"counterfactual:{name}"), questions)
    assert want.items() <= found.items()
    assert not want.items() <= OURS.items()


def test_what_no_candidate_explains_is_undetermined():
    found = answers(load("counterfactual:p-stochastic"), PRECISION)
    assert found["P's format"].startswith(i.UNDETERMINED)


def test_a_products_loss_is_not_taken_for_the_partials():
    found = answers(load("counterfactual:mma-13-bits"), (*PRECISION, i.division, i.partials))
    assert found["partials"] == "undetermined: products of 13 bits lose as much"


def reference(*arguments, **scales):
    return decode(*arguments, **scales)


def test_a_kernel_that_raises_ends_nothing():
    def kernel(query, kv, rows, valid, **scales):
        if (rows < 0).any():
            raise IndexError("a row id of -1")
        return reference(query, kv, rows, valid, **scales)

    found = answers(kernel, (i.lse_base, i.invalid_ids))
    assert found["id -1"] == "raises IndexError"
    assert found["id N"] == "is masked"

    def never(*arguments, **scales):
        raise RuntimeError("no such kernel")

    assert {f.determined for f in i.identify(never, (i.lse_base, i.partials))} == {False}


def test_a_kernel_that_answers_nothing_is_determined_in_nothing():
    def broken(*arguments, **scales):
        raise TypeError("no kernel at all")

    assert not any(f.determined for f in i.identify(broken, i.QUESTIONS[-1:]))


def test_lses_that_fit_no_base_are_undetermined():
    def kernel(*arguments, **scales):
        latent, lse = reference(*arguments, **scales)
        return latent, lse * np.float32(1.2)

    assert answers(kernel, (i.lse_base,))["LSE base"].startswith(i.UNDETERMINED)


def test_wide_outputs_are_told_from_bf16():
    def kernel(*arguments, **scales):
        latent, lse = reference(*arguments, **scales)
        return latent.astype(np.float32), lse

    assert answers(kernel, (i.out_rounding,))["output"] == "not BF16: 4 bytes an element"


def test_a_row_that_is_not_written_is_undetermined():
    def kernel(query, kv, rows, valid, **scales):
        latent, lse = reference(query, kv, rows, valid, **scales)
        empty = valid == 0
        latent[empty] = np.linspace(1, 2, 512).astype(ml_dtypes.bfloat16)
        return latent, lse

    assert answers(kernel, (i.empty_row,))["empty row"].startswith(i.UNDETERMINED)


@pytest.mark.parametrize("name", ["nothing", "no.such.module:f", "counterfactual:p", "math:pi"])
def test_names_of_nothing_are_refused(name):
    with pytest.raises(ValueError, match="kernel must be "):
        load(name)


def test_outputs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="answer must be of shapes"):
        call(lambda *a, **k: (np.zeros((1, 512)), np.zeros(1)), probe_cases.normal(1, 8))


def test_kernels_get_arrays_of_their_own():
    case = probe_cases.normal(1, 8)

    def kernel(query, kv, rows, valid, **scales):
        answer = reference(query, kv, rows, valid, **scales)
        for array in (query, kv, rows, valid):
            array[...] = 0
        return answer

    call(kernel, case)
    assert case.query.any()
    assert case.valid.tolist() == [8]


@pytest.mark.parametrize(
    "case",
    [
        probe_cases.levels_of_p(),
        probe_cases.moving_max(),
        probe_cases.cancelling_parts(),
        probe_cases.alignment(),
    ],
    ids=lambda c: c.name,
)
def test_probes_are_finite_and_exact(case):
    assert not np.any(case.kv & 0x7F == 0x7F)
    assert len(case.kv) % probe_cases.PAGE == 0
    assert np.all(case.rows[:, : case.counts.min()] > 0)
    rope = case.kv[:, 512:].view(ml_dtypes.float8_e4m3fn).astype(float)
    query = case.query[:, :, 512:].view(ml_dtypes.float8_e4m3fn).astype(float)
    assert np.all(case.query[:, :, :512] == 0)
    if case.name != "alignment":
        factor = query[0, :8, 0]
        assert np.array_equal(factor, 1 + np.arange(8) / 8)
        assert np.array_equal(query[0, :8, 2], factor / 64)
        assert np.all(rope[case.rows[0], :3] <= 0)
