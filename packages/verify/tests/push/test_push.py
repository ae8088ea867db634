"""Push mode: the cases are what they say, recordings round-trip, both layers agree on words."""

import dataclasses
import re

import numpy as np
import pytest

import sparse_mla_kernel.mailbox.layout as kernel_mailbox
import sparse_mla_reference.mailbox as reference_mailbox
from sparse_mla_kernel import MailboxLayout
from sparse_mla_reference import Mailbox
from sparse_mla_verify.evidence import push_recordings
from sparse_mla_verify.evidence.recordings import Check, Host
from sparse_mla_verify.gpu_runs.gpu import device_name
from sparse_mla_verify.push.check import HEADS, plan
from sparse_mla_verify.push.check import main as check_main
from sparse_mla_verify.push.group import Job, collect
from sparse_mla_verify.push.step_inputs import cycle, predict_step, special

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_name() is None, reason="no NVIDIA GPU on this computer"),
]


@pytest.fixture(scope="module")
def predicted():
    return {case.name: (case, predict_step(case)) for case in special(2, 8)}


def test_both_layers_agree_on_words():
    for name in ("QUERY_SENTINEL", "PAYLOAD_SENTINEL", "LSE_SENTINEL"):
        assert getattr(kernel_mailbox, name) == getattr(reference_mailbox, name)
    theirs = np.float32(reference_mailbox.EMPTY_LSE)
    assert np.float32(kernel_mailbox.EMPTY_LSE) == theirs
    assert theirs.view(np.uint32) == kernel_mailbox.EMPTY_LSE_BITS


@pytest.mark.parametrize("sizes", [(12, 8, 5, 96), (3, 2, 7, 9)])
def test_both_layers_agree_on_sizes(sizes):
    owner_heads, ranks, cap, padded = sizes
    box, ours = Mailbox.empty(*sizes), MailboxLayout(padded, owner_heads, ranks, cap)
    assert 2 * ours.query_bytes == box.query.nbytes
    assert 2 * ours.payload_bytes == box.payload.nbytes
    assert 2 * ours.lse_bytes == box.lse.nbytes


def payload_sent(case):
    """The BF16 encodings that the ranks of a case send for one of its rows with keys."""
    from sparse_mla_reference import SM90, decode

    query = np.concatenate(case.query, axis=1)
    found = [
        decode(query, *keys, scale_log2=case.scale_log2, out_scale=case.out_scale, machine=SM90)
        for keys in zip(case.kv, case.rows, case.valid, strict=True)
    ]
    full = [latent[np.isfinite(lse)].view(np.uint16) for latent, lse in found]
    return np.concatenate(full)


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("negative-subnormals", {0x8008, 0x0008}),
        ("negative-zeros", {0x8000, 0x0000}),
        ("largest-payload", {0x7F7F, 0xFF7F}),
        ("infinite-payload", {0x7F80, 0xFF80}),
    ],
)
def test_payloads_are_what_the_name_says(predicted, name, codes):
    case, _ = predicted[name]
    sent = payload_sent(case)
    assert sent.size > 10_000
    assert set(np.unique(sent).tolist()) == codes


def test_lses_are_what_the_name_says(predicted):
    _, bits = predicted["lse-far-below"]
    lse = bits.lse.view(np.float32)
    base2 = lse[np.isfinite(lse)] / np.log(2.0)
    assert base2.size > 20
    assert np.all(np.abs(base2 + 66854.859) < 6)


def test_rows_without_keys(predicted):
    _, bits = predicted["all-empty"]
    assert np.all(bits.lse.view(np.float32) == -np.inf)
    assert not bits.latent.any()
    case, _ = predicted["one-rank-only"]
    assert np.all(np.count_nonzero(np.stack(case.valid), axis=0) == 1)


@pytest.mark.parametrize(
    "name", ["nan-in-a-key", "nan-in-a-query", "negative-nan-words", "infinite-logits"]
)
def test_rows_are_dropped(predicted, name):
    _, bits = predicted[name]
    assert bits.dropped.any()
    assert not np.isnan(bits.lse.view(np.float32)).any()


def test_sound_rows_are_not_dropped(predicted):
    dropped = {name for name, (_, bits) in predicted.items() if bits.dropped.any()}
    assert dropped == {"nan-in-a-key", "nan-in-a-query", "negative-nan-words", "infinite-logits"}


def test_no_two_steps_of_a_cycle_are_alike():
    steps = cycle(3, 2, 8, batch=3, width=4)
    digests = {tuple(a.tobytes() for a in (*s.query, *s.rows)) for s in steps}
    assert len(digests) == 3
    again = cycle(3, 2, 8, batch=3, width=4)
    for a, b in zip(steps, again, strict=True):
        for field in ("query", "kv", "rows", "valid"):
            for x, y in zip(getattr(a, field), getattr(b, field), strict=True):
                assert np.array_equal(x, y)
    for s in steps:
        assert not any(v[-1] for v in s.valid)
        assert sum(v[-2] > 0 for v in s.valid) == 1


def test_the_plan():
    names = [name for name, _ in plan([2, 4, 8], [])]
    assert len(names) == len(set(names)) == 2 * 3 * len(HEADS) + 3 + 2 + 3
    assert [n for n, _ in plan([8], ["lost_peer"])] == ["lost_peer D=8 heads=96"]


HOST = Host("2026-01-01", "GPU", 2, "sm_90", "1", "3", "2", "13", "4", "0", "2")


def test_a_recording_round_trips(tmp_path):
    timing = push_recordings.Timing("step", "about", "graph", 1.5, (1.0, 1.5, 2.0))
    check = Check("steps", "about", 10, 0)
    recording = push_recordings.PushRecording(HOST, {"decode-b5": "ab"}, (check,), (timing,))
    path = tmp_path / "push.json"
    recording.save(path)
    assert push_recordings.load(path) == recording
    path.write_text("[]")
    with pytest.raises(ValueError, match="must be a recording of push mode"):
        push_recordings.load(path)


def test_what_the_ranks_report_is_summed(tmp_path):
    import json

    job = Job(2, 10, 10, 3, False, tmp_path)
    for rank, differing in enumerate((0, 3)):
        check = Check("steps", "about", 100, differing, f"rank {rank}" if differing else "")
        plain: dict[str, object] = {
            "host": dataclasses.asdict(HOST),
            "machine_code": {},
            "timings": [],
        }
        plain["checks"] = [dataclasses.asdict(check)]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(plain))
    (total,) = collect(job).checks
    assert (total.elements, total.differing, total.first) == (200, 3, "rank 1")
    assert not total.same


@pytest.mark.skipif(device_name() is not None, reason="a GPU is here")
def test_without_a_gpu(capsys):
    assert check_main([]) == 2
    assert re.search("push check needs an NVIDIA GPU", capsys.readouterr().err)


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(stage, marks=needs_gpu)
        for stage in (
            "special_steps",
            "many_steps",
            "graph_replay",
            "ranks_on_streams",
            "lost_peer",
        )
    ],
)
def test_on_the_gpu(only):
    assert check_main(["--ranks", "2", "--only", only]) == 0
