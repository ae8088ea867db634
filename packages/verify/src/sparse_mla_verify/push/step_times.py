"""Microseconds of a step at the latency checkpoint: 5 rows, 96 heads, 256 keys a row and rank."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sparse_mla_kernel import (
    CompiledStep,
    DcpMailbox,
    compile_dcp,
    compile_sparse,
    owner_merge,
    push_decode,
    query_exchange,
    run_dcp,
)
from sparse_mla_verify.evidence.push_recordings import Timing
from sparse_mla_verify.push.baselines import (
    AllToAll,
    GatherScatter,
    Local,
    gather_query,
    merge,
    to_owners,
)
from sparse_mla_verify.push.emulated import RankOutputs

BATCH, HEADS, KEYS, CACHE_ROWS = 5, 96, 256, 65536
SCALE_LOG2, OUT_SCALE = 0.06, 1.0
LISTS = 10  # different lists of row ids, in turn
REPEATS, CALLS, GRAPH_CALLS = 9, 200, 20

Call = Callable[[int], object]  # launches the k-th step


@dataclass(frozen=True, eq=False)
class TimedInputs:
    """One rank's inputs at the checkpoint, of random finite bytes."""

    query: torch.Tensor  # [batch, H, 576]
    kv: torch.Tensor  # [N, 576]
    rows: torch.Tensor  # [LISTS, batch, KEYS]
    valid: torch.Tensor  # [batch]
    none: torch.Tensor  # [batch], zeros


def inputs(rank: int, owner_heads: int, device: torch.device | str = "cuda") -> TimedInputs:
    """Seeded by the rank."""
    generator = torch.Generator(device=device).manual_seed(1000 + rank)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.to(torch.float8_e4m3fn).view(torch.uint8)

    rows = torch.randint(
        CACHE_ROWS, (LISTS, BATCH, KEYS), generator=generator, device=device, dtype=torch.int32
    )
    valid = torch.full((BATCH,), KEYS, dtype=torch.int32, device=device)
    query, kv = normal(BATCH, owner_heads, 576), normal(CACHE_ROWS, 576)
    return TimedInputs(query, kv, rows, valid, torch.zeros_like(valid))


def time_eager(call: Call, align: Callable[[], None]) -> list[float]:
    """us a call, once a repetition: `CALLS` calls back to back, by events."""
    for k in range(20):
        call(k)
    return [_timed(lambda: [call(k) for k in range(CALLS)], align) / CALLS for _ in range(REPEATS)]


def time_graph(call: Call, align: Callable[[], None]) -> list[float]:
    """us a call, once a repetition: replays of one graph of `GRAPH_CALLS` calls, back to back."""
    for k in range(3):
        call(k)
    align()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, may make calls that a global capture mode forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for k in range(GRAPH_CALLS):
            call(k)
    replays = CALLS // GRAPH_CALLS
    graph.replay()
    return [
        _timed(lambda: [graph.replay() for _ in range(replays)], align) / CALLS
        for _ in range(REPEATS)
    ]


def _timed(work: Callable[[], object], align: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    align()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000.0


def step_call(
    kernels: CompiledStep, mailbox: DcpMailbox, given: TimedInputs, valid: torch.Tensor
) -> Call:
    """The fused step, lists of row ids in turn."""
    out = RankOutputs(BATCH, mailbox.box.owner_heads, mailbox.device)

    def call(k: int) -> None:
        rows = given.rows[k % LISTS]
        keys = (given.kv, rows, valid)
        run_dcp(kernels, mailbox, given.query, *keys, out.latent, out.lse, SCALE_LOG2, OUT_SCALE)

    return call


def group_timings(
    mailbox: DcpMailbox, align: Callable[[], None], slowest: Callable[[list[float]], list[float]]
) -> tuple[list[Timing], float]:
    """A step between GPUs and what it is compared with; and how far their results are apart.

    Args:
        mailbox: This rank's, of `HEADS` heads in all.
        align: A barrier.
        slowest: The largest of all ranks' times, run by run.

    Returns:
        The timings, and the largest difference of a latent from either baseline's.
    """
    ranks, owner_heads = mailbox.box.ranks, mailbox.box.owner_heads
    given = inputs(mailbox.rank, owner_heads, mailbox.device)
    kernels = compile_dcp(mailbox, BATCH, KEYS)
    latent_kernel = compile_sparse(BATCH, HEADS, HEADS, KEYS, BATCH, mailbox.device)
    local = Local(latent_kernel, given.kv, given.valid, SCALE_LOG2, OUT_SCALE)
    a, b = AllToAll(local, ranks), GatherScatter(local, ranks)
    apart = _apart(kernels, mailbox, given, (a, b))
    steps = {
        "step": ("exchange, decode with push, owner merge", given.valid),
        "step, no keys": ("the same with no key on any rank", given.none),
    }
    calls = {n: (x, step_call(kernels, mailbox, given, v)) for n, (x, v) in steps.items()}
    gathered = gather_query(given.query, ranks)
    for name, about, baseline in (("a", A, a), ("b", B, b)):
        calls[name] = (about, _baseline_call(baseline, given))
    for name, valid in (("decode", given.valid), ("decode, no keys", given.none)):
        calls[name] = (
            "latent mode, one rank",
            _decode_call(replace(local, valid=valid), gathered, given),
        )
    timings = []
    for name, (about, call) in calls.items():
        for mode, measure in (("graph", time_graph), ("eager", time_eager)):
            runs = slowest(measure(call, align))
            timings.append(Timing(name, about, mode, statistics.median(runs), tuple(runs)))
    return timings, apart


A = "query all-gather, decode, NCCL all-to-all of rows and LSEs, merge in torch"
B = "query all-gather, decode, LSE all-gather, scaling, reduce-scatter of BF16 rows"


def _baseline_call(baseline: AllToAll | GatherScatter, given: TimedInputs) -> Call:
    return lambda k: baseline.step(given.query, given.rows[k % LISTS])


def _decode_call(local: Local, gathered: torch.Tensor, given: TimedInputs) -> Call:
    return lambda k: local.decode(gathered, given.rows[k % LISTS])


def _apart(
    kernels: CompiledStep,
    mailbox: DcpMailbox,
    given: TimedInputs,
    others: Sequence[AllToAll | GatherScatter],
) -> float:
    """The largest difference of a step's latent from the baselines', as a share of the largest."""
    out = RankOutputs(BATCH, mailbox.box.owner_heads, mailbox.device)
    keys = (given.kv, given.rows[0], given.valid)
    run_dcp(kernels, mailbox, given.query, *keys, out.latent, out.lse, SCALE_LOG2, OUT_SCALE)
    worst = 0.0
    for other in others:
        latent, lse = other.step(given.query, given.rows[0])
        scale = float(out.latent.float().abs().max().item())
        worst = max(worst, float((latent.float() - out.latent.float()).abs().max().item()) / scale)
        worst = max(worst, float((lse - out.lse).abs().max().item()) / 100)
    return worst


def emulated_timings(ranks: int) -> list[Timing]:
    """The kernels of D emulated ranks on one GPU, us a rank and step, from CUDA graphs.

    Stages are told apart by leaving later ones out: the exchange and the decode wait for nothing
    that a merge does. The baselines' collectives are copies within the GPU here, which flatters
    them: their local work is what is timed.
    """
    owner_heads = HEADS // ranks
    boxes = DcpMailbox.emulated(ranks, owner_heads, BATCH)
    kernels = compile_dcp(boxes[0], BATCH, KEYS)
    given = [inputs(r, owner_heads) for r in range(ranks)]
    outs = [RankOutputs(BATCH, owner_heads, "cuda") for _ in range(ranks)]

    def stages(count: int) -> Call:
        def call(k: int) -> None:
            for m, g in zip(boxes, given, strict=True):
                query_exchange(kernels, m, g.query)
            for m, g in zip(boxes, given, strict=True):
                if count > 1:
                    keys = (g.kv, g.rows[k % LISTS], g.valid)
                    push_decode(kernels, m, *keys, SCALE_LOG2, OUT_SCALE)
            for m, o in zip(boxes, outs, strict=True):
                if count > 2:
                    owner_merge(kernels, m, o.latent, o.lse)

        return call

    timings = []
    names = ("exchange", "exchange and decode", "exchange, decode and merge")
    for count, name in enumerate(names, 1):
        for m in boxes:
            m.reset()
        timings.append(_per_rank(f"D={ranks}: {name}", "emulated", stages(count), ranks))
    timings += _emulated_baselines(ranks, given)
    return timings


def _emulated_baselines(ranks: int, given: Sequence[TimedInputs]) -> list[Timing]:
    kernel = compile_sparse(BATCH, HEADS, HEADS, KEYS, BATCH, "cuda")
    locals_ = [Local(kernel, g.kv, g.valid, SCALE_LOG2, OUT_SCALE) for g in given]
    queries = torch.stack([g.query for g in given])

    def decode_all(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = queries.transpose(0, 1).flatten(1, 2).contiguous()
        parts = [
            local.decode(gathered, g.rows[k % LISTS])
            for local, g in zip(locals_, given, strict=True)
        ]
        latents, lses = zip(*parts, strict=True)
        return torch.stack(latents), torch.stack(lses)

    def all_to_all(k: int) -> None:
        latent, lse = decode_all(k)  # [D, batch, heads, ...]
        # All owners at once: their heads side by side.
        merge(latent, lse)

    def gather_scatter(k: int) -> None:
        latent, lse = decode_all(k)
        total = torch.logsumexp(lse, dim=0)
        weight = torch.exp(lse - total).nan_to_num_(0.0)
        scaled = (weight.unsqueeze(-1) * latent.float()).to(torch.bfloat16)
        to_owners(scaled.sum(dim=0), ranks)

    return [
        _per_rank(f"D={ranks}: a, its local work", "decode and torch merge", all_to_all, ranks),
        _per_rank(
            f"D={ranks}: b, its local work", "decode, torch scaling, sum", gather_scatter, ranks
        ),
    ]


def _per_rank(name: str, about: str, call: Call, ranks: int) -> Timing:
    runs = [us / ranks for us in time_graph(call, lambda: None)]
    return Timing(name, f"{about}; us a rank", "graph", statistics.median(runs), tuple(runs))
