"""Push mode between GPUs: `sparse-mla-audit push group --gpus 2 --out FILE.json`.

Each GPU has a process, spawned here. The run has steps back to back, graph replay, ranks delayed at
random, a lost rank, and the benchmark. Expected bits come from the simulated step, computed before
the processes start; `--steps` steps cycle over `--distinct` of them. All waits are bounded, and
past `--seconds` the processes are ended.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparse_mla_verify.evidence.push_recordings import PushRecording, Timing, artifacts_of
from sparse_mla_verify.evidence.recordings import Check
from sparse_mla_verify.push.step_inputs import (
    BATCH,
    GROUP_KEYS,
    WIDTH,
    StepBits,
    cycle,
    predict_steps,
)
from sparse_mla_verify.terminal.options import one_or_more, parser

if TYPE_CHECKING:
    import torch

    from sparse_mla_kernel import CompiledStep, DcpMailbox
    from sparse_mla_verify.push.emulated import RankInputs

HEADS = 96
TIMEOUT_S, LOST_TIMEOUT_S = 5.0, 0.5
MOST_DELAY_US = 1000
CYCLES_PER_US = 1900
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """What every process does."""

    ranks: int
    steps: int
    replays: int
    distinct: int
    bench: bool
    folder: Path

    @property
    def owner_heads(self) -> int:
        """Heads of one rank."""
        return HEADS // self.ranks


class Worker:
    """One rank's process."""

    def __init__(self, job: Job, rank: int) -> None:
        import torch
        import torch.distributed as dist

        from sparse_mla_kernel import DcpMailbox, compile_dcp
        from sparse_mla_verify.gpu_runs.gpu import on_device
        from sparse_mla_verify.push.emulated import RankInputs

        self.job, self.rank = job, rank
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{job.folder / 'rendezvous'}",
            rank=rank,
            world_size=job.ranks,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device,
        )
        sizes = (job.owner_heads, BATCH)
        self.mailbox = DcpMailbox.symmetric(None, *sizes, timeout_s=TIMEOUT_S, device=self.device)
        self.kernels: CompiledStep = compile_dcp(self.mailbox, BATCH, WIDTH)
        cases = cycle(job.distinct, job.ranks, job.owner_heads, most=GROUP_KEYS)
        self.inputs = [RankInputs(case, rank, self.device) for case in cases]
        with np.load(job.folder / "expected.npz") as stored:
            self.latent = on_device(stored["latent"][:, rank], self.device)
            self.lse = on_device(stored["lse"][:, rank], self.device)
        self.align()
        self.say(f"ready, {len(cases)} distinct steps, mailbox of {self.mailbox.box.size} bytes")

    def say(self, text: str) -> None:
        """Progress, from rank 0 alone."""
        if self.rank == 0:
            print(f"[{time.strftime('%X')}] {text}", flush=True)

    def align(self) -> None:
        """Meet the other ranks, with an idle device."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier(device_ids=[self.rank])

    def delay(self, rng: np.random.Generator) -> None:
        """Make one rank, drawn alike on all, late by up to a millisecond: its GPU or its host."""
        import torch

        rank, us, on_host = rng.integers(self.job.ranks), rng.random() * MOST_DELAY_US, rng.random()
        if rank != self.rank:
            return
        if on_host < 0.5:
            time.sleep(us * 1e-6)
        else:
            torch.cuda._sleep(int(us * CYCLES_PER_US))

    def steps(self, delayed: bool) -> list[Check]:
        """Steps back to back, with inputs and counts that change from step to step."""
        import torch

        job = self.job
        shape = (job.steps, BATCH, job.owner_heads)
        latent = torch.full((*shape, 512), 0x7FA5, dtype=torch.int16, device=self.device)
        lse = torch.full(shape, 0x7FA5A5A5, dtype=torch.int32, device=self.device)
        rng = np.random.default_rng(7)
        self.align()
        began = time.perf_counter()
        for k in range(job.steps):
            if delayed:
                self.delay(rng)
            given = self.inputs[k % job.distinct]
            self.step(
                self.mailbox, given, latent[k].view(torch.bfloat16), lse[k].view(torch.float32)
            )
        torch.cuda.synchronize()
        self.mailbox.check()
        took = time.perf_counter() - began
        turn = torch.arange(job.steps, device=self.device) % job.distinct
        bad, first = 0, ""
        for start in range(0, job.steps, 100):
            part = slice(start, start + 100)
            wrong = (latent[part] != self.latent[turn[part]]).flatten(1).sum(1)
            wrong += (lse[part] != self.lse[turn[part]]).flatten(1).sum(1)
            bad += int(wrong.sum().item())
            if bad and not first:
                where = int(torch.argmax((wrong > 0).int()).item()) + start
                first = f"rank {self.rank}, step {where}"
        name = "steps, delayed" if delayed else "steps"
        self.say(f"{name}: {job.steps} in {took:.2f} s, {bad} elements differ {first}")
        about = f"{job.steps} steps back to back, {job.distinct} inputs in turn"
        if delayed:
            about += f"; one rank late by up to {MOST_DELAY_US} us before each"
        elements = latent.numel() + lse.numel()
        return [Check(name, about, elements, bad, first)]

    def step(
        self,
        mailbox: "DcpMailbox",
        given: "RankInputs",
        latent: "torch.Tensor",
        lse: "torch.Tensor",
    ) -> None:
        """One step on the current stream."""
        from sparse_mla_kernel import run_dcp

        keys, scales = given.keys, given.scales
        run_dcp(self.kernels, mailbox, given.query, *keys, latent, lse, *scales)

    def replays(self, count: int, replays: int, *, changing: bool, delayed: bool) -> list[Check]:
        """One graph of `count` steps, replayed; its results are compared inside the graph."""
        import torch

        from sparse_mla_verify.push.emulated import RankOutputs

        given, wanted, outputs = [], [], []
        for k in range(count):
            source = self.inputs[k]
            given.append(source.clone())
            wanted.append((self.latent[k].clone(), self.lse[k].clone()))
            outputs.append(RankOutputs(BATCH, self.job.owner_heads, self.device))
        bad = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.align()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for k in range(count):
                outputs[k].poison()
                self.step(self.mailbox, given[k], outputs[k].latent, outputs[k].lse)
                bad += (outputs[k].latent.view(torch.int16) != wanted[k][0]).sum()
                bad += (outputs[k].lse.view(torch.int32) != wanted[k][1]).sum()
        rng = np.random.default_rng(8)
        self.align()
        began = time.perf_counter()
        for replay in range(replays):
            if delayed:
                self.delay(rng)
            if changing:
                for k in range(count):
                    turn = (replay * count + k) % self.job.distinct
                    given[k].copy_(self.inputs[turn])
                    wanted[k][0].copy_(self.latent[turn])
                    wanted[k][1].copy_(self.lse[turn])
            graph.replay()
        torch.cuda.synchronize()
        self.mailbox.check()
        took = time.perf_counter() - began
        name = f"graph of {count}" + ", new inputs" * changing + ", delayed" * delayed
        found = int(bad.item())
        self.say(f"{name}: {replays} replays in {took:.2f} s, {found} elements differ")
        elements = replays * sum(lat.numel() + x.numel() for lat, x in wanted)
        first = f"rank {self.rank}" if found else ""
        return [
            Check(name, f"{replays} replays of one graph of {count} steps", elements, found, first)
        ]

    def lost_peer(self) -> list[Check]:
        """The last rank leaves out a step, then half of one. The others report it and recover."""
        import torch

        from sparse_mla_kernel import DcpMailbox, PeerTimeoutError, Stage, query_exchange
        from sparse_mla_verify.push.emulated import RankOutputs

        job, lost = self.job, self.job.ranks - 1
        mailbox = DcpMailbox.symmetric(
            None, job.owner_heads, BATCH, timeout_s=LOST_TIMEOUT_S, device=self.device
        )
        outputs = RankOutputs(BATCH, job.owner_heads, self.device)
        wrong: list[str] = []
        compared, bad = 0, 0
        for stage in Stage:
            self.align()
            began = time.perf_counter()
            if self.rank == lost:
                if stage is Stage.PARTIAL:
                    query_exchange(self.kernels, mailbox, self.inputs[0].query)
                time.sleep(2 * LOST_TIMEOUT_S)
            else:
                self.step(mailbox, self.inputs[0], outputs.latent, outputs.lse)
                torch.cuda.synchronize()
                took = time.perf_counter() - began
                try:
                    mailbox.check()
                    wrong.append(f"rank {self.rank}, {stage.name}: no error")
                except PeerTimeoutError as error:
                    self.say(f"lost {stage.name.lower()}, noticed after {took:.4f} s: {error}")
                    if (error.rank, error.stage) != (lost, stage):
                        wrong.append(f"rank {self.rank}, {stage.name}: {error}")
                if not LOST_TIMEOUT_S <= took < LOST_TIMEOUT_S + 0.2:
                    wrong.append(f"rank {self.rank}, {stage.name}: noticed after {took:.4f} s")
            mailbox.reset()
            for k in range(3):
                outputs.poison()
                self.step(mailbox, self.inputs[k], outputs.latent, outputs.lse)
                bad += int((outputs.latent.view(torch.int16) != self.latent[k]).sum().item())
                bad += int((outputs.lse.view(torch.int32) != self.lse[k]).sum().item())
                compared += outputs.latent.numel() + outputs.lse.numel()
            mailbox.check()
        self.align()
        about = f"the error comes within {LOST_TIMEOUT_S} s + 0.2 s and names rank and stage"
        text = "; ".join(wrong)
        return [
            Check("lost peer", about, 2 * len(Stage), len(wrong), text),
            Check("after reset", "steps after a loss and a reset", compared, bad, ""),
        ]

    def armed(self) -> list[Check]:
        """Every word of the mailbox is its sentinel once all ranks are done."""
        import torch

        self.align()
        m, left, words = self.mailbox, 0, 0
        for region, word in ((m.query, -1), (m.payload, -(2**31)), (m.lse, -1)):
            flat = region.reshape(-1).view(torch.int32)
            left += int((flat != word).sum().item())
            words += flat.numel()
        return [Check("armed", "mailbox words that are not sentinels", words, left, "")]

    def bench(self) -> tuple[list[Check], list[Timing]]:
        """Timings; as a check, that the baselines compute the same."""
        import torch
        import torch.distributed as dist

        from sparse_mla_kernel import DcpMailbox
        from sparse_mla_verify.push.step_times import group_timings

        mailbox = DcpMailbox.symmetric(
            None, self.job.owner_heads, BATCH, timeout_s=TIMEOUT_S, device=self.device
        )

        def slowest(runs: list[float]) -> list[float]:
            times = torch.tensor(runs, dtype=torch.float64, device=self.device)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            return [float(us) for us in times.tolist()]

        timings, apart = group_timings(mailbox, self.align, slowest)
        mailbox.check()
        for t in timings:
            self.say(f"{t.name} ({t.mode}): {t.us:.2f} us")
        about = "largest distance of a step's latent from either baseline's under 2% of the largest"
        first = "" if apart < 0.02 else f"rank {self.rank}: {apart}"
        return [Check("baselines agree", about, 2, int(apart >= 0.02), first)], timings

    def run(self) -> tuple[list[Check], list[Timing]]:
        """Run everything. What may break the group comes last."""
        replays = self.job.replays
        checks = self.steps(delayed=False)
        checks += self.steps(delayed=True)
        checks += self.replays(1, replays, changing=False, delayed=False)
        checks += self.replays(1, replays, changing=True, delayed=False)
        checks += self.replays(3, replays, changing=False, delayed=False)
        checks += self.replays(2, replays // 2, changing=True, delayed=True)
        checks += self.armed()
        timings: list[Timing] = []
        if self.job.bench:
            found, timings = self.bench()
            checks += found
        checks += self.lost_peer()
        return checks, timings


def work(job: Job, rank: int) -> None:
    """A process's main function; its results go to a file of the job's folder."""
    import torch.distributed as dist

    from sparse_mla_verify.gpu_runs.gpu import host

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    worker = Worker(job, rank)
    checks, timings = worker.run()
    plain = {
        "host": asdict(replace(host(), gpu_count=job.ranks)),
        "machine_code": artifacts_of(worker.kernels, BATCH, job.owner_heads, job.ranks, WIDTH),
        "checks": [asdict(c) for c in checks],
        "timings": [asdict(t) for t in timings],
    }
    (job.folder / f"rank{rank}.json").write_text(json.dumps(plain))
    dist.destroy_process_group()


def collect(job: Job) -> PushRecording:
    """The ranks' results as one recording: counts summed, timings as the slowest rank's."""
    from sparse_mla_verify.evidence.recordings import Host

    found = [json.loads((job.folder / f"rank{r}.json").read_text()) for r in range(job.ranks)]
    checks = []
    for several in zip(*(f["checks"] for f in found), strict=True):
        parts = [Check(**c) for c in several]
        first = next((c.first for c in parts if c.first), "")
        checks.append(
            replace(
                parts[0],
                elements=sum(c.elements for c in parts),
                differing=sum(c.differing for c in parts),
                first=first,
            )
        )
    timings = [Timing(**{**t, "runs_us": tuple(t["runs_us"])}) for t in found[0]["timings"]]
    return PushRecording(
        Host(**found[0]["host"]), found[0]["machine_code"], tuple(checks), tuple(timings)
    )


def store_expected(job: Job, workers: int) -> None:
    """Predict the distinct steps."""
    began = time.perf_counter()
    cases = cycle(job.distinct, job.ranks, job.owner_heads, most=GROUP_KEYS)
    expected: list[StepBits] = predict_steps(cases, workers)
    np.savez(
        job.folder / "expected.npz",
        latent=np.stack([e.latent for e in expected]),
        lse=np.stack([e.lse for e in expected]),
    )
    took = time.perf_counter() - began
    print(f"{len(cases)} steps predicted in {took:.1f} s by {workers} processes", flush=True)


def run_processes(target: Callable[..., None], job: Job, seconds: float) -> list[str]:
    """Run `target(job, rank)` in a process a rank; what went wrong."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(job, r)) for r in range(job.ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if any(p.exitcode for p in processes):
            deadline = min(deadline, time.monotonic() + 15)  # the others can't finish
        time.sleep(0.1)
    wrong = []
    for r, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            wrong.append(f"rank {r} was still running after {seconds:.0f} s")
        process.join()
        if process.exitcode:
            wrong.append(f"rank {r} ended with {process.exitcode}")
    return wrong


def print_ratios(timings: Sequence[Timing]) -> None:
    """How many steps fit into one of each baseline."""
    by_name: dict[tuple[str, str], float] = {(t.name, t.mode): t.us for t in timings}
    for (name, mode), us in by_name.items():
        if name in ("a", "b"):
            own = by_name["step", mode]
            print(f"{name}, {mode}: {us:.1f} us, {us / own:.2f} x the step's {own:.1f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on several GPUs; 0 if every bit agrees, 1 if not, 2 with too few GPUs."""
    command = parser("push group", __doc__)
    command.add_argument("--gpus", type=int, default=2)
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--replays", type=int, default=1000)
    command.add_argument("--distinct", type=int, default=61, help="distinct steps; odd is better")
    command.add_argument("--seconds", type=float, default=220.0, help="limit of the whole run")
    command.add_argument("--workers", type=one_or_more, default=max(1, (os.cpu_count() or 2) - 1))
    command.add_argument("--no-bench", action="store_true")
    command.add_argument("--out", type=Path, help="where to write the recording (JSON)")
    given = command.parse_args(arguments)
    if given.distinct < 3 or HEADS % given.gpus:
        command.error(
            f"--distinct must be 3 or more and --gpus a divisor of {HEADS}, "
            f"got {given.distinct} and {given.gpus}"
        )
    import torch

    if torch.cuda.device_count() < given.gpus:
        print(
            f"the GPUs must be {given.gpus} or more, got {torch.cuda.device_count()}",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            given.gpus, given.steps, given.replays, given.distinct, not given.no_bench, Path(folder)
        )
        store_expected(job, given.workers)
        wrong = run_processes(work, job, given.seconds - (time.monotonic() - began))
        if wrong:
            print("\n".join(wrong), file=sys.stderr, flush=True)
            return 1
        record = collect(job)
    if given.out:
        record.save(given.out)
    for check in record.checks:
        print(
            f"{check.name}: {check.differing} of {check.elements} differ {check.first}", flush=True
        )
    print_ratios(record.timings)
    failed = [check.name for check in record.checks if not check.same]
    print(f"{len(record.checks)} checks, {len(failed)} failed: {failed}", flush=True)
    return 1 if failed else 0
