"""Push mode on one GPU: `sparse-mla-audit push check --ranks 2 4 8`.

D emulated ranks share the GPU. Every step's rows and LSEs are compared with the simulated step bit
for bit. Between steps every word of every mailbox must be its sentinel again. All waits are
bounded, and so is the whole run: a check that doesn't fit into `--seconds` counts as failed.

    compute-sanitizer --tool memcheck python -m sparse_mla_verify push check --sanitize
"""

import faulthandler
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_mla_verify.evidence.push_recordings import PushRecording, Timing, artifacts_of
from sparse_mla_verify.evidence.recordings import Check
from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.measure.bits import Comparison
from sparse_mla_verify.push.step_inputs import (
    BATCH,
    CYCLE,
    CYCLE_KEYS,
    WIDTH,
    StepBits,
    cycle,
    drawn,
    joined,
    predict_steps,
    special,
    step_digest,
)
from sparse_mla_verify.terminal.options import one_or_more, parser

if TYPE_CHECKING:
    from sparse_mla_kernel import Stage
    from sparse_mla_verify.push.emulated import Group, RankInputs

#: Heads in all; each is divided by the number of ranks.
HEADS = (96, 128)
LAPS = 6
LOST_TIMEOUT_S = 0.25
STREAM_STEPS = 300


def count_check(name: str, about: str, found: int, wanted: int, elements: int = 1) -> Check:
    """A check of one number; `elements` is how many things were counted over."""
    first = "" if found == wanted else f"found {found}, wanted {wanted}"
    return Check(name, about, elements, abs(found - wanted), first)


def compared_with(expected: Sequence[StepBits], check: Check) -> Check:
    """The check with the digest of what it was compared with."""
    return replace(check, expected=joined(map(step_digest, expected)))


def special_steps(ranks: int, heads: int, workers: int) -> list[Check]:
    """Every special payload and LSE, twice in a row so that both parities see it."""
    from sparse_mla_verify.push.emulated import Group, compare_step

    owner_heads = heads // ranks
    cases = list(special(ranks, owner_heads))
    group = Group(ranks, owner_heads, BATCH, WIDTH, cap=BATCH + 2, padded=heads + 16)
    runs = []
    for k, case in enumerate(cases):
        inputs = group.inputs(case)
        order = np.random.default_rng(k).permutation(ranks).tolist()
        group.reset()
        for parity in range(2):
            outputs = group.outputs()
            group.step(inputs, outputs, order if parity else None)
            runs.append((case, parity, outputs, group.dropped(), group.unarmed()))
    predicted = predict_steps(cases, workers)
    expected = dict(zip((c.name for c in cases), predicted, strict=True))
    compared: list[Comparison] = []
    dropped_wrong, unarmed = 0, 0
    for case, parity, outputs, dropped, words in runs:
        want = expected[case.name]
        compared += compare_step(f"{case.name}, parity {parity}", outputs, want)
        dropped_wrong += int(np.sum(dropped != (parity + 1) * want.dropped))
        unarmed += words
    where = f"D={ranks} x {owner_heads} heads"
    mailbox_words = group.box.size // 4 * ranks * len(runs)
    return [
        compared_with(
            predicted,
            Check.of(f"special/{where}", f"{len(cases)} special steps, both parities", compared),
        ),
        count_check(
            f"dropped/{where}", "counts of dropped rows", dropped_wrong, 0, ranks**2 * len(runs)
        ),
        count_check(f"armed/{where}", "words left in mailboxes", unarmed, 0, mailbox_words),
    ]


def many_steps(ranks: int, heads: int, workers: int) -> list[Check]:
    """Steps back to back with no host in between, inputs changing from step to step."""
    import torch

    from sparse_mla_verify.push.emulated import Group, compare_step

    owner_heads = heads // ranks
    cases = cycle(CYCLE, ranks, owner_heads, most=CYCLE_KEYS)
    group = Group(ranks, owner_heads, BATCH, WIDTH)
    inputs = [group.inputs(case) for case in cases]
    outputs = [group.outputs() for _ in range(CYCLE * LAPS)]
    torch.cuda.synchronize()
    for k, out in enumerate(outputs):
        group.step(inputs[k % CYCLE], out)
    torch.cuda.synchronize()
    expected = predict_steps(cases, workers)
    compared = [
        c
        for k, out in enumerate(outputs)
        for c in compare_step(f"step {k}", out, expected[k % CYCLE])
    ]
    where = f"D={ranks} x {owner_heads} heads"
    about = f"{len(outputs)} steps back to back, {CYCLE} inputs in turn"
    epochs = sum(m.epoch() != len(outputs) for m in group.mailboxes)
    return [
        compared_with(expected, Check.of(f"steps/{where}", about, compared)),
        count_check(f"epoch/{where}", "ranks whose epoch is not the step count", epochs, 0, ranks),
        count_check(f"armed-after-steps/{where}", "words left", group.unarmed(), 0, ranks),
    ]


def graph_replay(ranks: int, heads: int, workers: int) -> list[Check]:
    """One graph of 1, 2 or 3 steps replayed back to back; outputs compared inside the graph."""
    import torch

    from sparse_mla_verify.push.emulated import Group

    owner_heads = heads // ranks
    cases = cycle(3, ranks, owner_heads, most=4)
    expected = predict_steps(cases, workers)
    checks = []
    for count, replays in ((1, 301), (2, 100), (3, 101)):
        group = Group(ranks, owner_heads, BATCH, WIDTH)
        wanted = [expected_on_device(e) for e in expected[:count]]
        inputs = [group.inputs(case) for case in cases[:count]]
        outputs = [group.outputs() for _ in range(count)]
        bad = torch.zeros(1, dtype=torch.int64, device="cuda")
        group.step(inputs[0], outputs[0])  # loads the kernels before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for given, out, want in zip(inputs, outputs, wanted, strict=True):
                for one in out:
                    one.poison()
                group.step(given, out)
                for one, (latent, lse) in zip(out, want, strict=True):
                    bad += (one.latent.view(torch.int16) != latent).sum()
                    bad += (one.lse.view(torch.int32) != lse).sum()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        group.check()
        elements = replays * sum(lat.numel() + x.numel() for w in wanted for lat, x in w)
        name = f"graph/{count} steps/D={ranks} x {owner_heads} heads"
        checks.append(
            count_check(name, f"{replays} replays back to back", int(bad.item()), 0, elements)
        )
    return checks


def expected_on_device(expected: StepBits, ranks: Sequence[int] | None = None) -> list[Any]:
    """`(latent, lse)` as int16 and int32 tensors, an entry a rank (of `ranks`, or all)."""
    from sparse_mla_verify.gpu_runs.gpu import on_device

    chosen = range(len(expected.latent)) if ranks is None else ranks
    return [
        (on_device(expected.latent[r], "cuda"), on_device(expected.lse[r], "cuda")) for r in chosen
    ]


def ranks_on_streams(ranks: int, heads: int, workers: int) -> list[Check]:
    """Each rank on a stream of its own, so that they really wait for each other; 16 heads."""
    import torch

    from sparse_mla_verify.push.emulated import Group, compare_step

    del heads
    owner_heads = 16 // ranks
    cases = cycle(CYCLE, ranks, owner_heads, batch=1, width=4)
    group = Group(ranks, owner_heads, 1, 4)
    inputs = [group.inputs(case) for case in cases]
    outputs = [group.outputs() for _ in range(STREAM_STEPS)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    # Code is loaded at its first launch, which may wait for an idle GPU: let it not be while one
    # rank waits for the next. A group that loses its peers at once does for that.
    scratch = Group(ranks, owner_heads, 1, 4, timeout_s=0.01)
    scratch.step_side_by_side(inputs[0], outputs[0], streams[:1])
    torch.cuda.synchronize()
    for k, out in enumerate(outputs):
        group.step_side_by_side(inputs[k % CYCLE], out, streams)
    torch.cuda.synchronize()
    group.check()
    expected = predict_steps(cases, workers)
    compared = [
        c
        for k, out in enumerate(outputs)
        for c in compare_step(f"step {k}", out, expected[k % CYCLE])
    ]
    name = f"streams/D={ranks} x {owner_heads} heads"
    return [Check.of(name, f"{STREAM_STEPS} steps, each rank on its own stream", compared)]


def lost_peer(ranks: int, heads: int, workers: int) -> list[Check]:
    """The last rank sends no query, then no partial. A reset and a correct step follow each."""
    import torch

    from sparse_mla_kernel import Stage
    from sparse_mla_verify.push.emulated import Group, compare_step

    owner_heads = heads // ranks
    case = drawn("lost", ranks, owner_heads, most=4)
    group = Group(ranks, owner_heads, BATCH, WIDTH, timeout_s=LOST_TIMEOUT_S)
    inputs = group.inputs(case)
    group.step(inputs, group.outputs())
    torch.cuda.synchronize()
    group.check()
    wrong: list[str] = []
    compared: list[Comparison] = []
    expected = predict_steps([case], workers)[0]
    for stage in Stage:
        wrong += [f"{stage.name}: {what}" for what in _lose(group, inputs, stage)]
        group.reset()
        for parity in range(2):
            outputs = group.outputs()
            group.step(inputs, outputs)
            compared += compare_step(f"after {stage.name}, parity {parity}", outputs, expected)
    where = f"D={ranks} x {owner_heads} heads"
    about = f"a timeout of {LOST_TIMEOUT_S} s kept, rank and stage named, NaN given"
    return [
        Check(f"lost-peer/{where}", about, 5 * len(Stage), len(wrong), "; ".join(wrong)),
        Check.of(f"after-reset/{where}", "steps after a loss and a reset", compared),
    ]


def _lose(group: "Group", inputs: "list[RankInputs]", stage: "Stage") -> list[str]:
    """Rank 0 runs a step in which the last rank leaves a stage out. Returns what went wrong."""
    import torch

    from sparse_mla_kernel import PeerTimeoutError, Stage, owner_merge, push_decode, query_exchange

    kernels, boxes, outputs = group.kernels, group.mailboxes, group.outputs()
    lost = len(boxes) - 1
    senders = range(lost if stage is Stage.QUERY else lost + 1)
    for r in senders:
        query_exchange(kernels, boxes[r], inputs[r].query)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for r in range(1 if stage is Stage.QUERY else lost):
        push_decode(kernels, boxes[r], *inputs[r].keys, *inputs[r].scales)
    owner_merge(kernels, boxes[0], outputs[0].latent, outputs[0].lse)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    print(f"  lost {stage.name.lower()}: noticed after {took:.4f} s", flush=True)
    wrong = []
    if not LOST_TIMEOUT_S <= took < LOST_TIMEOUT_S + 0.1:
        wrong.append(f"took {took:.4f} s, the timeout is {LOST_TIMEOUT_S} s")
    try:
        boxes[0].check()
        wrong.append("no error")
    except PeerTimeoutError as error:
        print(f"  {error}", flush=True)
        if (error.rank, error.stage, error.waiting) != (lost, stage, 0):
            wrong.append(str(error))
    try:
        query_exchange(kernels, boxes[0], inputs[0].query)
        wrong.append("a step was launched after the loss")
    except PeerTimeoutError:
        pass
    if not bool(torch.isnan(outputs[0].lse).any().item()):
        wrong.append("no NaN in the LSEs of the step that lost a rank")
    return wrong


PARTS: tuple[Callable[[int, int, int], list[Check]], ...] = (
    special_steps,
    many_steps,
    graph_replay,
    ranks_on_streams,
    lost_peer,
)


def plan(
    ranks: Sequence[int], stages: Sequence[str]
) -> Iterator[tuple[str, Callable[[int], list[Check]]]]:
    """What runs: each stage for each number of ranks, and head count where it matters."""
    chosen = [s for s in PARTS if not stages or s.__name__ in stages]
    for stage in chosen:
        for d in ranks:
            if stage is ranks_on_streams and d > 4:
                continue  # more ranks than a GPU has room for side by side
            for heads in HEADS if stage in (special_steps, many_steps) else HEADS[:1]:
                name = f"{stage.__name__} D={d} heads={heads}"
                yield name, lambda workers, s=stage, d=d, h=heads: s(d, h, workers)  # type: ignore[misc]


def sanitize() -> None:
    """A few small steps for compute-sanitizer; nothing is compared."""
    import torch

    from sparse_mla_verify.push.emulated import Group

    for ranks in (2, 4):
        owner_heads = 16 // ranks
        group = Group(ranks, owner_heads, 2, 6, cap=3, padded=24, timeout_s=600.0)
        for case in cycle(3, ranks, owner_heads, batch=2, width=6):
            group.step(group.inputs(case), group.outputs())
        torch.cuda.synchronize()
        print(f"D={ranks}: 3 steps, {group.unarmed()} words left", flush=True)


def machine_code_of(ranks: Sequence[int]) -> dict[str, str]:
    """The kernels that the steps ran with."""
    from sparse_mla_kernel import MailboxLayout, compile_step
    from sparse_mla_kernel.checks import resolve_device

    found: dict[str, str] = {}
    for d in ranks:
        for heads in HEADS:
            box = MailboxLayout(heads, heads // d, d, BATCH)
            kernels = compile_step(BATCH, WIDTH, box, resolve_device("cuda"))
            found |= artifacts_of(kernels, BATCH, heads // d, d, WIDTH)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if every bit agrees, 1 if not, 2 without a GPU."""
    command = parser("push check", __doc__)
    command.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    command.add_argument("--only", nargs="+", default=[], choices=[s.__name__ for s in PARTS])
    command.add_argument("--seconds", type=float, default=220.0, help="limit of the whole run")
    command.add_argument("--workers", type=one_or_more, default=max(1, (os.cpu_count() or 2) - 1))
    command.add_argument("--out", type=Path, help="where to write the recording (JSON)")
    command.add_argument("--bench", type=int, help="time the kernels of so many ranks, too")
    command.add_argument(
        "--sanitize", action="store_true", help="a short run for compute-sanitizer"
    )
    given = command.parse_args(arguments)
    # Ranks on streams of their own must not queue behind each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if lacks_gpu("push check"):
        return 2
    from sparse_mla_verify.gpu_runs.gpu import host

    if given.sanitize:
        sanitize()
        return 0
    # Every wait is bounded; should one not be after all, the process ends.
    faulthandler.dump_traceback_later(given.seconds + 60, exit=True)
    began = time.perf_counter()
    checks: list[Check] = []
    for name, run in plan(given.ranks, given.only):
        if time.perf_counter() - began > given.seconds:
            checks.append(Check(name, "no time left", 1, 1, "not run"))
            continue
        start = time.perf_counter()
        try:
            found = run(given.workers)
        except Exception as error:
            found = [Check(name, "raised", 1, 1, f"{type(error).__name__}: {error}")]
        checks += found
        for check in found:
            verdict = "same" if check.same else f"FAILED: {check.first[:400]}"
            print(
                f"{check.name}: {check.differing} of {check.elements} differ; {verdict}", flush=True
            )
        print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
    timings: list[Timing] = []
    if given.bench:
        from sparse_mla_verify.push.step_times import emulated_timings

        timings = emulated_timings(given.bench)
        for t in timings:
            print(f"{t.name}: {t.us:.2f} us a rank ({t.mode})", flush=True)
    if given.out:
        machine = replace(host(), gpu_count=1)
        PushRecording(machine, machine_code_of(given.ranks), tuple(checks), tuple(timings)).save(
            given.out
        )
    failed = [check.name for check in checks if not check.same]
    print(f"{len(checks)} checks, {len(failed)} failed: {failed}", flush=True)
    return 1 if failed else 0
