from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_verify.inputs import cases as c

FINITE = [name for name in c.FAMILIES if name != "nan-used"]


def logits(case, row):
    return c.exact_logits(case, row)


def named(cases, family):
    return [case for case in cases.values() if case.family == family]


def test_the_whole_set_is_large_enough(cases):
    assert sum(case.tiles for case in cases.values()) >= 2000
    assert len({case.signature for case in cases.values()}) <= 18
    assert {case.heads for case in cases.values()} >= set(range(16, 129, 16))


def test_names_are_unique_and_start_with_the_family():
    made = c.all_cases()
    assert len({case.name for case in made}) == len(made)
    assert all(case.name.startswith(case.family + "/") and case.about for case in made)


def test_cases_are_made_the_same_each_time(cases):
    again = {case.name: case.digest() for case in c.all_cases(["normal", "invalid-ids"])}
    assert again == {name: cases[name].digest() for name in again}


def test_the_digest_sees_every_input(cases):
    case = cases["counts/short"]
    digests = {case.digest()}
    for name in ("query", "kv", "rows", "valid"):
        changed = getattr(case, name).copy()
        changed.flat[-1] ^= 1
        digests.add(replace(case, **{name: changed}).digest())
    digests.add(replace(case, scale_log2=case.scale_log2 * 2).digest())
    digests.add(replace(case, out_scale=case.out_scale * 2).digest())
    digests.add(replace(case, heads=0).digest())
    assert len(digests) == 8


def test_inputs_are_read_only(cases):
    with pytest.raises(ValueError, match="read-only"):
        cases["normal/short"].kv[0, 0] = 1


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="abnormal"):
        c.all_cases(["abnormal"])


def test_cache_rows_that_no_counted_id_names_hold_nan(cases):
    for case in cases.values():
        used = [case.rows[r, : case.counts[r]] for r in range(case.batch)]
        ids = np.unique(np.concatenate(used))
        unnamed = np.setdiff1d(np.arange(len(case.kv)), ids)
        assert len(unnamed) >= 1, case.name
        assert np.all(case.kv[unnamed] == c.NAN_BYTE), case.name


def test_used_keys_and_queries_are_finite(cases):
    for case in cases.values():
        if case.family == "nan-used":
            continue
        for row in range(case.batch):
            ids = case.rows[row, : case.counts[row]]
            ids = ids[(ids >= 0) & (ids < len(case.kv))]
            assert not np.any(case.kv[ids] & 0x7F == c.NAN_BYTE), case.name
            assert not np.any(case.query[row, : case.heads] & 0x7F == c.NAN_BYTE), case.name


def test_what_lies_past_batch_and_heads_is_nan(cases):
    padded = cases["padded-heads/mailbox"]
    assert padded.padded > padded.heads
    assert padded.query.shape[0] > padded.batch
    for case in cases.values():
        assert np.all(case.query[case.batch :] == c.NAN_BYTE)
        assert np.all(case.query[:, case.heads :] == c.NAN_BYTE)


def test_equal_logits_are_equal(cases):
    levels = set()
    for case in named(cases, "equal-logits"):
        for row in range(case.batch):
            levels |= set(np.unique(logits(case, row)))
        values = c.e4m3_values(case.kv[case.rows[0, : case.counts[0]], : c.LATENT])
        assert np.all(values.std(axis=0) > 0)
    assert levels == {0.0, -3.0625}


def test_dominant_is_one_at_0_and_the_rest_at_minus_7(cases):
    for name, rest in (("dominant/on-grid", -7.0), ("dominant/off-grid", -7.5)):
        case = cases[name]
        for row in range(case.batch):
            row_logits = logits(case, row)
            assert row_logits.shape[1] == 2048
            assert np.all(np.sort(row_logits, axis=1)[:, :-1] == rest)
            assert np.all(row_logits.max(axis=1) == 0.0)
            values = case.kv[case.rows[row, :2048], : c.LATENT]
            assert np.all(values == values[0])


def test_hugely_negative_logits_are_at_66854_859(cases):
    assert np.float32(c.HUGELY_NEGATIVE) == np.float32(-66854.859)
    case = cases["hugely-negative/equal"]
    product = np.float32(-448) * np.float32(case.scale_log2)
    assert product == np.float32(c.HUGELY_NEGATIVE)
    for row in range(case.batch):
        assert np.all(logits(case, row) == -448 * case.scale_log2)
        around = logits(cases["hugely-negative/around"], row)
        assert np.all(np.abs(around - c.HUGELY_NEGATIVE) < 10)
    assert np.ptp(logits(cases["hugely-negative/around"], 0)) > 5


def test_the_max_rises_in_the_last_chunk_of_every_cta(cases):
    for case in named(cases, "rising-max"):
        for row in range(case.batch):
            chunks = logits(case, row).reshape(case.heads, 4, 8, 64).max(axis=-1)
            earlier = np.maximum.accumulate(chunks, axis=-1)[..., :-1]
            rises = chunks[..., 1:] > earlier
            assert np.all(rises[..., -1])
            assert np.all(rises) == (case.name == "rising-max/every-chunk") or not np.any(
                rises[..., :-1].all(axis=-1)
            )


def test_counts_hold_every_edge(cases):
    case = cases["counts/edges"]
    wanted = {0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 511, 2048}
    assert wanted <= set(case.counts.tolist())
    assert case.valid.max() > case.rows.shape[1]
    assert case.valid.min() == -(2**31)
    assert set(cases["counts/short"].counts.tolist()) == set(range(64))


def test_invalid_ids_lie_where_the_family_says(cases):
    case = cases["invalid-ids/places"]
    ids = c.invalid_ids_of(len(case.kv))
    assert ids == (-(2**31), -1, len(case.kv), 2**31 - 1)
    outside = (case.rows < 0) | (case.rows >= len(case.kv))
    for k, place in enumerate(c.INVALID_PLACES.values()):
        for j, wanted in enumerate(ids):
            row = 4 * k + j
            assert np.all(case.rows[row, place] == wanted)
            assert outside[row].sum() == place.stop - place.start
    mixture, lone = case.batch - 2, case.batch - 1
    assert set(ids) <= set(case.rows[mixture][outside[mixture]].tolist())
    assert (~outside[lone]).sum() == 1
    valid = case.rows[~outside]
    assert valid.min() == 0
    assert valid.max() == len(case.kv) - 1


def test_nan_is_used_in_a_key_and_in_a_query(cases):
    case = cases["nan-used/keys-and-query"]
    key_nan = [
        np.any(case.kv[case.rows[r, : case.counts[r]]] & 0x7F == c.NAN_BYTE)
        for r in range(case.batch)
    ]
    query_nan = np.any(case.query[: case.batch, : case.heads] & 0x7F == c.NAN_BYTE, axis=-1)
    assert key_nan == [True, True, False, True, False]
    assert np.argwhere(query_nan).tolist() == [[2, 5], [2, 90]]


def bytes_of(case):
    used = [case.kv[case.rows[r, : case.counts[r]]] for r in range(case.batch)]
    return np.concatenate([*used, case.query[: case.batch, : case.heads].reshape(-1, c.COLUMNS)])


def test_distributions_are_what_they_are_called(cases):
    normal = c.e4m3_values(bytes_of(cases["normal/checkpoint"]))
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    # Below the E4M3 number 1: below 0.96875 before the rounding.
    assert abs(np.mean(np.abs(normal) < 1) - 0.6673) < 0.002

    heavy = np.abs(c.e4m3_values(bytes_of(cases["heavy-tailed/checkpoint"])))
    assert heavy.max() > 100 * np.median(heavy)

    tiny = np.abs(c.e4m3_values(bytes_of(cases["tiny/checkpoint"])))
    assert 0.3 < np.mean(tiny < 2.0**-6) < 0.7
    assert tiny.max() < 2.0**-3

    uniform = bytes_of(cases["uniform-bytes/checkpoint"])
    found = np.bincount(uniform.ravel(), minlength=256)
    assert np.sum(found == 0) == 2
    assert found[found > 0].min() > 0.85 * found[found > 0].max()

    subnormal = bytes_of(cases["subnormal-heavy/checkpoint"])
    assert np.mean(subnormal & 0x78 == 0) > 0.88

    sharp = logits(cases["peaky/checkpoint"], 0)
    weight = np.exp2(sharp - sharp.max(axis=1, keepdims=True))
    assert np.median(1 / weight.sum(axis=1)) > 0.9


def test_the_underflow_case_gives_bf16_subnormals(cases):
    from sparse_mla_verify.measure.predict import predict

    latent, _ = predict(cases["tiny/underflow"].row(40))
    assert np.all(latent & 0x7F80 == 0)
    assert np.mean(latent & 0x7FFF != 0) > 0.5


def test_e4m3_bytes_saturate_and_keep_nan():
    values = np.array([448.0, 464.0, 1e9, -np.inf, np.nan, 1.0625, -0.0], np.float32)
    assert c.e4m3_bytes(values).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x38, 0x80]
