"""Every wrong argument of push mode is an error that names it, and nothing is launched."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparse_mla_kernel import (
    BASE,
    Artifact,
    CompiledSparse,
    CompiledStep,
    DcpMailbox,
    MailboxLayout,
    PeerTimeoutError,
    Stage,
    compile_dcp,
    cross_compile,
    dcp_decode,
    owner_merge,
    push_decode,
    query_exchange,
    run_dcp,
    run_sparse,
)
from sparse_mla_kernel.mailbox.device import DeviceMailbox

BATCH, OWNER_HEADS, RANKS, PADDED, WIDTH, CAP, N = 2, 8, 2, 32, 8, 3, 5
BOX = MailboxLayout(PADDED, OWNER_HEADS, RANKS, CAP)
CPU = torch.device("cpu")


class StandIn(DcpMailbox):
    """A mailbox without memory: what the checks look at, and no more."""

    def __init__(self, box: MailboxLayout = BOX) -> None:
        self.box = box
        self.rank = 1
        self.device = CPU
        self.timeout_s = 0.25
        self.arguments = DeviceMailbox(0, 0, 0, 0, 0, 1)
        self.report(0, 0, 0, 0)

    def report(self, *words: int) -> None:
        self._report_words = torch.tensor(words, dtype=torch.int32).numpy()


def _never(*_: object) -> None:
    pytest.fail("launched")


KERNELS = CompiledStep(BATCH, WIDTH, BOX, CPU, {}, _never, _never, _never, _never)
KERNEL = CompiledSparse(
    BATCH,
    BOX.heads,
    PADDED,
    WIDTH,
    CAP,
    CPU,
    BASE,
    Artifact("sm_90a", "", b""),
    _never,
    (OWNER_HEADS, RANKS, CAP),
)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def arguments() -> dict[str, object]:
    return {
        "query": zeros(BATCH, OWNER_HEADS, 576),
        "kv": zeros(N, 576),
        "rows": zeros(BATCH, WIDTH, dtype=torch.int32),
        "valid": zeros(BATCH, dtype=torch.int32),
        "latent": zeros(BATCH, OWNER_HEADS, 512, dtype=torch.bfloat16),
        "lse": zeros(BATCH, OWNER_HEADS, dtype=torch.float32),
        "scale_log2": 0.1,
        "out_scale": 1.0,
    }


WRONG = [
    (
        "query",
        zeros(BATCH, PADDED, 576),
        ValueError,
        r"query has shape .*; it may be \[2, 8, 576\]",
    ),
    ("query", zeros(BATCH, OWNER_HEADS, 576, dtype=torch.int8), TypeError, "query is torch.int8"),
    ("kv", zeros(N, 656), ValueError, r"kv has shape \[5, 656\]; it may be \[N, 576\]"),
    ("kv", zeros(2 * N, 576)[::2], ValueError, "kv has strides"),
    ("rows", zeros(BATCH, 9, dtype=torch.int32), ValueError, r"rows .* it may be \[>=2, 8\]"),
    ("valid", zeros(1, dtype=torch.int32), ValueError, r"valid .* it may be \[>=2\]"),
    ("latent", zeros(BATCH, PADDED, 512, dtype=torch.bfloat16), ValueError, "latent has shape"),
    ("lse", zeros(BATCH, OWNER_HEADS, dtype=torch.float64), TypeError, "lse is torch.float64"),
    ("scale_log2", float("nan"), ValueError, "scale_log2 is nan"),
    ("out_scale", "1", TypeError, "out_scale is a str"),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG)
def test_a_wrong_argument_of_a_step(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    launch_step: Callable[..., None],
) -> None:
    wrong = {**arguments(), name: value}
    with pytest.raises(error, match=says):
        run_dcp(replace(KERNELS, step=launch_step), StandIn(), **wrong)


def _is_taken(name: str, says: str) -> bool:
    """Whether the launcher itself would take it for the argument."""
    return "int8" in says or name in ("valid", "scale_log2", "out_scale")


TAKEN = [case for case in WRONG if _is_taken(case[0], case[3])]
REFUSED = [case for case in WRONG if not _is_taken(case[0], case[3])]


@pytest.mark.parametrize(("name", "value", "error", "says"), TAKEN)
def test_what_the_launcher_of_a_step_would_take(
    name: str, value: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run_dcp(KERNELS, StandIn(), **{**arguments(), name: value})


def test_what_a_step_is_launched_with() -> None:
    launched: list[tuple] = []
    mailbox, named = StandIn(), arguments()
    run_dcp(replace(KERNELS, step=lambda *given: launched.append(given)), mailbox, **named)
    [given] = launched
    assert all(a is b for a, b in zip(given[:6], named.values(), strict=False))
    assert given[6:] == (0.1, 1.0, mailbox.arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch over no memory at all")
@pytest.mark.parametrize("case", [None, *REFUSED])
def test_what_the_launcher_of_a_step_checks(
    case: tuple | None, launch_step: Callable[..., None], on_gpu: Callable[..., object]
) -> None:
    given = {name: on_gpu(value) for name, value in arguments().items()}
    if case is None:
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):  # past its checks, it finds no GPU
            launch_step(*given.values(), StandIn().arguments)
        return
    number = list(given).index(case[0])
    given[case[0]] = on_gpu(case[1])
    with pytest.raises(ValueError, match=rf"(?s)(Mismatched|Misaligned) .*argument #{number}"):
        launch_step(*given.values(), StandIn().arguments)


def _part(name: str) -> object:
    named = arguments()
    scales = named["scale_log2"], named["out_scale"]
    parts = {
        "query_exchange": lambda k, m: query_exchange(k, m, named["query"]),
        "push_decode": lambda k, m: push_decode(k, m, *(named[n] for n in KEYS), *scales),
        "owner_merge": lambda k, m: owner_merge(k, m, named["latent"], named["lse"]),
        "step": lambda k, m: run_dcp(k, m, **named),
    }
    return parts[name]


KEYS = ("kv", "rows", "valid")
PARTS = ("query_exchange", "push_decode", "owner_merge", "step")


@pytest.mark.parametrize("name", PARTS)
def test_wrong_kernels_and_mailboxes(name: str) -> None:
    part = _part(name)
    with pytest.raises(TypeError, match="kernels is a str; it may be what compile_dcp returned"):
        part("kernels", StandIn())
    with pytest.raises(TypeError, match="mailbox is a NoneType; it may be a DcpMailbox"):
        part(KERNELS, None)
    with pytest.raises(ValueError, match=r"mailbox is .*cap=4\) on cpu; it may be what the kernel"):
        part(KERNELS, StandIn(replace(BOX, cap=4)))


@pytest.mark.parametrize("name", PARTS)
def test_a_lost_peer_is_named_before_anything_is_launched(name: str) -> None:
    mailbox = StandIn()
    mailbox.report(2, 0, 1, 7)
    with pytest.raises(PeerTimeoutError, match="rank 0's partial of row 1, head 7") as caught:
        _part(name)(KERNELS, mailbox)
    error = caught.value
    assert (error.waiting, error.rank, error.stage) == (1, 0, Stage.PARTIAL)
    assert (error.row, error.head, error.timeout_s) == (1, 7, 0.25)
    assert "rank 1 waited 0.25 s" in str(error)


def test_the_modes_of_run_sparse() -> None:
    named = {**arguments(), "query": None, "latent": None, "lse": None}
    with pytest.raises(TypeError, match="push is a NoneType; it may be this rank's DcpMailbox"):
        run_sparse(KERNEL, **named)
    with pytest.raises(ValueError, match="push may be None: the kernel was compiled without it"):
        run_sparse(replace(KERNEL, push=None), **arguments(), push=StandIn())
    with pytest.raises(ValueError, match=r"push is .*cap=9"):
        run_sparse(KERNEL, **named, push=StandIn(replace(BOX, cap=9)))
    for name in ("query", "latent", "lse"):
        given = {**named, name: arguments()[name]}
        with pytest.raises(ValueError, match=f"{name} is given; it may be None in push mode"):
            run_sparse(KERNEL, **given, push=StandIn())
    mailbox = StandIn()
    mailbox.report(1, 0, 0, 0)
    with pytest.raises(PeerTimeoutError, match="rank 0's query"):
        run_sparse(KERNEL, **named, push=mailbox)


def test_what_push_mode_launches_with() -> None:
    seen: list[object] = []
    mailbox = StandIn()
    named = {**arguments(), "query": None, "latent": None, "lse": None}
    launch = replace(KERNEL, launch=lambda *given: seen.extend(given))
    run_sparse(launch, **named, push=mailbox)
    assert [type(x) for x in seen[3:]] == [float, float, DeviceMailbox]
    assert seen[-1] == mailbox.arguments


@pytest.mark.parametrize(
    ("push", "error", "says"),
    [
        ([8, 2, 3], TypeError, r"push is \[8, 2, 3\]; it may be None or \(owner heads, ranks, cap"),
        ((8, 2), TypeError, r"push is \(8, 2\)"),
        ((8.0, 2, 3), TypeError, "push's owner heads is 8.0, a float"),
        ((16, 0, 3), ValueError, "push's ranks is 0; it may be 1 to 32"),
        ((1, 33, 3), ValueError, "push's ranks is 33"),
        ((8, 3, 3), ValueError, "24 heads in all; heads may be that, and is 16"),
        ((8, 2, 4), ValueError, "push's cap is 4; it may be the q mailbox's, which is 3"),
    ],
)
def test_a_wrong_push(push: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cross_compile(BATCH, BOX.heads, PADDED, WIDTH, CAP, push=push)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"owner_heads": 12}, ValueError, "owner_heads is 12; times 2 ranks it may be a multiple"),
        ({"owner_heads": 8.0}, TypeError, "owner_heads is 8.0, a float"),
        ({"ranks": 0}, ValueError, "ranks is 0; it may be 1 to 32"),
        ({"ranks": "2"}, TypeError, "ranks is '2', a str"),
        ({"cap": 0}, ValueError, "cap is 0; it may be 1 to 65535"),
        ({"padded": 8}, ValueError, "padded is 8; it may be 16, all ranks' heads, or more"),
        ({"timeout_s": 0}, ValueError, "timeout_s is 0; it may be up to 3600 seconds"),
        ({"timeout_s": "1"}, TypeError, "timeout_s is a str"),
        ({"device": "cpu"}, ValueError, "device is cpu; it may be a CUDA device"),
    ],
)
def test_a_wrong_mailbox(change: dict[str, object], error: type[Exception], says: str) -> None:
    named = {"ranks": RANKS, "owner_heads": OWNER_HEADS, "cap": CAP, **change}
    with pytest.raises(error, match=says):
        DcpMailbox.emulated(**named)


@pytest.mark.parametrize(
    ("batch", "width", "error", "says"),
    [
        (4, WIDTH, ValueError, "cap is 3; it may be batch or more, and batch is 4"),
        (0, WIDTH, ValueError, "batch is 0 and width 8"),
        (1.0, WIDTH, TypeError, "batch is 1.0, a float"),
        (BATCH, 0, ValueError, "width 0"),
        (BATCH, WIDTH, ValueError, "device is cpu; it may be a CUDA device"),
    ],
)
def test_a_wrong_compile(batch: object, width: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compile_dcp(StandIn(), batch, width)


def test_a_wrong_decode() -> None:
    named = arguments()
    del named["latent"], named["lse"]
    with pytest.raises(TypeError, match="mailbox is a NoneType"):
        dcp_decode(None, **named)
    with pytest.raises(ValueError, match=r"query has shape .*; it may have 3 dimensions"):
        dcp_decode(StandIn(), **{**named, "query": named["query"][0]})
    with pytest.raises(TypeError, match="rows is a NoneType"):
        dcp_decode(StandIn(), **{**named, "rows": None})


def test_the_layout() -> None:
    """Regions follow each other without overlap, each on a boundary of 256 bytes."""
    box = MailboxLayout(40, 3, 5, 7)
    regions = [
        (box.query, 2 * box.query_bytes),
        (box.payload, 2 * box.payload_bytes),
        (box.lse, 2 * box.lse_bytes),
        (box.dropped, 4 * box.ranks),
    ]
    assert (box.query_bytes, box.payload_bytes) == (7 * 40 * 576, 5 * 7 * 3 * 1024)
    assert box.lse_bytes == 5 * 7 * 3 * 4
    end = 0
    for start, size in regions:
        assert start % 256 == 0
        assert end <= start < end + 256
        end = start + size
    assert end <= box.size < end + 256
