"""The division of keys."""

from dataclasses import asdict

import pytest

from sparse_mla_reference import BASE, LOW_LATENCY, Schedule


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 7, 8, 31, 64, 255, 256, 257, 511, 2048])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_parts_cover_the_list_in_order(count, split):
    schedule = Schedule(split=split)
    parts = schedule.parts(count)
    per = -(-count // split)
    assert len(parts) == split
    assert [i for p in parts for i in range(count)[p]] == list(range(count))
    for rank, part in enumerate(parts):
        assert (part.start, part.stop) == (min(count, rank * per), min(count, rank * per + per))


SHIPPED = {
    "base": (
        BASE,
        {"split": 4, "chunk": 64, "qk_chains": 2, "warp_keys": 8, "pv_keys": 32,
         "qk_order": "strided", "deal": 0, "mma": "e4m3"},
    ),
    "low latency": (
        LOW_LATENCY,
        {"split": 8, "chunk": 64, "qk_chains": 4, "warp_keys": 64, "pv_keys": 16,
         "qk_order": "blocked", "deal": 8, "mma": "f16"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "numbers"), SHIPPED.values(), ids=SHIPPED)
def test_what_ships(schedule, numbers):
    """The kernels' numbers. More zero rows of V change no bit, so pv_keys shows here alone."""
    assert asdict(schedule) == numbers


def test_chunks():
    spans = [(c.start, c.stop) for c in BASE.chunks(130)]
    assert spans == [(0, 64), (64, 128), (128, 130)]
    assert list(BASE.chunks(0)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": 0}, "split must be an integer from 1 to 64, got 0"),
        ({"chunk": 2.5}, "chunk must be an integer from 1 to 4096, got 2.5"),
        ({"split": True}, "split must be an integer .*, got True"),
        ({"deal": False}, "deal must be an integer from 0 to 1024, got False"),
        ({"split": 65}, "split must be .*, got 65"),
        ({"chunk": 8192}, "chunk must be .*, got 8192"),
        ({"qk_chains": 37}, "qk_chains must be an integer from 1 to 36, got 37"),
        ({"deal": 1025}, "deal must be .*, got 1025"),
        ({"warp_keys": 6}, "warp_keys must be a power of two, got 6"),
        ({"chunk": 60}, r"chunk must be a multiple of warp_keys \(8\), got 60"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**fields)


@pytest.mark.parametrize(
    ("name", "least", "most", "others"),
    [
        ("split", 1, 64, {}),
        ("chunk", 1, 4096, {"warp_keys": 1}),
        ("qk_chains", 1, 36, {}),
        ("warp_keys", 1, 4096, {"chunk": 4096}),
        ("pv_keys", 1, 4096, {}),
        ("deal", 0, 1024, {}),
    ],
)
def test_the_limits_themselves_are_inside(name, least, most, others):
    for value in (least, most):
        assert getattr(Schedule(**{name: value, **others}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} must be an integer from {least} to {most}"):
            Schedule(**{name: value, **others})
