"""Checks on a GPU that compare runs with each other, or more than one case with the reference."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from sparse_mla_verify.evidence.recordings import Check
from sparse_mla_verify.gpu_runs.gpu import Inputs
from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    LATENT,
    NAN_BYTE,
    Case,
    all_cases,
    batch_of_64,
)
from sparse_mla_verify.inputs.schedules import BASE
from sparse_mla_verify.measure.bits import Comparison, compare_bits
from sparse_mla_verify.measure.poisoned import POISONS
from sparse_mla_verify.measure.predict import Bits, predict

REPLAYS = 100
BYTES_LIMIT = 2**31
FAR_ROWS = 3_800_000  # of 576 bytes: 2.19e9 bytes
LIMIT_ROW = BYTES_LIMIT // COLUMNS  # 3,728,270: the limit lies inside this row


def named(name: str, schedule: str = BASE) -> Case:
    """A case by its name, on a schedule."""
    return next(c for c in all_cases([name.split("/")[0]], schedule) if c.name == name)


class Outputs:
    """Output buffers on the device that can be poisoned and read."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        shape = (case.batch, case.padded)
        self.latent = torch.empty((*shape, LATENT), dtype=torch.int16, device=device)
        self.lse = torch.empty(shape, dtype=torch.int32, device=device)

    def poison(self, name: str = "NaN") -> None:
        """Fill with one of `POISONS`."""
        latent, lse = POISONS[name]
        self.latent.fill_(latent)
        self.lse.fill_(lse)

    def bits(self) -> Bits:
        """The encodings of the heads that are used."""
        latent = self.latent[:, : self.case.heads].cpu().numpy().view(np.uint16)
        lse = self.lse[:, : self.case.heads].cpu().numpy().view(np.uint32)
        return latent, lse


def decode_once(case: Case, device: str) -> Bits:
    """A case's encodings from one run over poisoned buffers."""
    inputs, outputs = Inputs(case, device), Outputs(case, device)
    outputs.poison()
    inputs.launch(outputs.latent, outputs.lse)
    return outputs.bits()


def compare_outputs(what: str, actual: Bits, expected: Bits) -> list[Comparison]:
    """Both outputs, bit for bit."""
    latent, lse = (
        compare_bits(f"{what}, {name}", actual[k], expected[k])
        for k, name in enumerate(("latent", "lse"))
    )
    return [latent, lse]


def batch_independence(device: str = "cuda", schedule: str = BASE) -> Check:
    """Each of 64 rows alone against the same row in its batch of 64."""
    case = replace(batch_of_64(), schedule=schedule)
    together = decode_once(case, device)
    compared: list[Comparison] = []
    for row in range(case.batch):
        alone = decode_once(case.row(row), device)
        expected = (together[0][row : row + 1], together[1][row : row + 1])
        compared += compare_outputs(f"row {row} alone", alone, expected)
    return Check.of("batch-independence", _about(batch_independence), compared)


def graph_replay(device: str = "cuda", schedule: str = BASE) -> Check:
    """A batch captured in a CUDA graph and replayed 100 times over poison, against a plain run."""
    compared: list[Comparison] = []
    batch = replace(batch_of_64(), schedule=schedule)
    for case in (batch, named("normal/checkpoint", schedule)):
        expected = decode_once(case, device)
        inputs, outputs = Inputs(case, device), Outputs(case, device)
        inputs.launch(outputs.latent, outputs.lse)  # loads the kernel before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inputs.launch(outputs.latent, outputs.lse)
        for replay in range(REPLAYS):
            outputs.poison(("NaN", "finite")[replay % 2])
            graph.replay()
            compared += compare_outputs(f"{case.name}, replay {replay}", outputs.bits(), expected)
    return Check.of("graph-replay", _about(graph_replay), compared)


def runs_agree(device: str = "cuda", schedule: str = BASE) -> Check:
    """A batch of 64 launched 100 times back to back, each run against the first."""
    case = replace(batch_of_64(), schedule=schedule)
    inputs = Inputs(case, device)
    outputs = [Outputs(case, device) for _ in range(REPLAYS)]
    for each in outputs:
        each.poison()
    for each in outputs:
        inputs.launch(each.latent, each.lse)
    expected = outputs[0].bits()
    compared = [
        comparison
        for k, each in enumerate(outputs[1:], 1)
        for comparison in compare_outputs(f"run {k}", each.bits(), expected)
    ]
    return Check.of("runs-agree", _about(runs_agree), compared)


def far_rows(device: str = "cuda", schedule: str = BASE) -> Check:
    """A cache of over 2^31 bytes, ids on both sides of the limit, against the compact cache."""
    case = named("normal/checkpoint", schedule)
    rng = np.random.default_rng(2**31)
    near = np.arange(LIMIT_ROW - 200, LIMIT_ROW + 200)
    others = rng.choice(FAR_ROWS, 4 * len(case.kv), replace=False)
    places = np.concatenate([near, [0, FAR_ROWS - 1], others])
    _, first = np.unique(places, return_index=True)
    places = places[np.sort(first)][: len(case.kv)].astype(np.int32)
    # A compact row's id is mapped to a far one; what is left over stays NaN.
    live = np.unique(case.rows)
    far = torch.full((FAR_ROWS, COLUMNS), NAN_BYTE, dtype=torch.uint8, device=device)
    mapped = np.zeros(len(case.kv), np.int32)
    mapped[live] = places[: len(live)]
    where = torch.from_numpy(mapped[live]).long().to(device)
    far[where] = torch.from_numpy(case.kv[live]).to(device)
    inputs = Inputs(replace(case, rows=mapped[case.rows]), device)
    outputs = Outputs(case, device)
    inputs.kv = far
    outputs.poison()
    inputs.launch(outputs.latent, outputs.lse)
    compared = compare_outputs(f"{FAR_ROWS} rows", outputs.bits(), predict(case))
    return Check.of("far-rows", _about(far_rows), compared)


def dependent_launches(device: str = "cuda", schedule: str = BASE) -> Check:
    """A kernel whose KV the kernel just before it writes, 100 pairs in a CUDA graph under PDL.

    In a graph no launch waits for the host. Under PDL the reader's CTAs are on the GPU while the
    writer still runs. If they read too early, they read poison.
    """
    writer, reader = chained_cases(schedule)
    expected = predict(reader)
    write, read = Inputs(writer, device), Inputs(reader, device)
    middle = [Outputs(writer, device) for _ in range(REPLAYS)]
    final = [Outputs(reader, device) for _ in range(REPLAYS)]

    def launch_pairs() -> None:
        for between, out in zip(middle, final, strict=True):
            write.launch(between.latent, between.lse)
            read.kv = between.latent.view(torch.uint8).reshape(-1, COLUMNS)
            read.launch(out.latent, out.lse)

    launch_pairs()  # loads both kernels before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_pairs()
    for each in (*middle, *final):
        each.poison()
    graph.replay()
    compared = [
        comparison
        for k, out in enumerate(final)
        for comparison in compare_outputs(f"pair {k}", out.bits(), expected)
    ]
    return Check.of("dependent-launches", _about(dependent_launches), compared)


def chained_cases(schedule: str = BASE) -> tuple[Case, Case]:
    """A case whose latent is exactly its V, and one whose KV is that latent's bytes.

    With one key a row the latent is the key's V in BF16, whose bytes are no E4M3 NaN. 9 rows x 16
    heads x 512 columns x 2 bytes are 256 cache rows.
    """
    reader = named("normal/checkpoint", schedule)
    short = named("counts/short", schedule)
    order = np.arange(1, 10)  # rows with at least one key each
    writer = replace(
        short,
        name="chained/writer",
        query=short.query[order],
        rows=short.rows[order],
        valid=np.ones(len(order), np.int32),
    )
    latent, _ = predict(writer)
    kv = latent.view(np.uint8).reshape(-1, COLUMNS).copy()
    if np.any(kv & 0x7F == NAN_BYTE):
        raise ValueError("the chained cache must hold no NaN, got one")
    rng = np.random.default_rng(9)
    rows = np.stack([rng.permutation(len(kv)) for _ in range(reader.batch)]).astype(np.int32)
    return writer, replace(reader, name="chained/reader", kv=kv, rows=rows)


def _about(check: Callable[..., Check]) -> str:
    return " ".join((check.__doc__ or "").split("\n\n")[0].split())


LAUNCH_CHECKS: MappingProxyType[str, Callable[..., Check]] = MappingProxyType(
    {
        check.__name__.replace("_", "-"): check
        for check in (batch_independence, graph_replay, runs_agree, far_rows, dependent_launches)
    }
)
