"""A step of push mode: a wrong argument is an error that names it, and nothing is launched."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla_kernel import (
    CompiledStep,
    DcpMailbox,
    MailboxLayout,
    PeerTimeoutError,
    Stage,
    compile_dcp,
    dcp_decode,
    owner_merge,
    push_decode,
    query_exchange,
    run_dcp,
)

BATCH, OWNER_HEADS, RANKS, PADDED, WIDTH, CAP, N = 2, 8, 2, 32, 8, 3, 5
BOX = MailboxLayout(PADDED, OWNER_HEADS, RANKS, CAP)
CPU = torch.device("cpu")


def _never(*_: object) -> None:
    pytest.fail("launched")


KERNELS = CompiledStep(BATCH, WIDTH, BOX, CPU, {}, _never, _never, _never, _never)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def arguments() -> dict[str, Any]:
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


BYTES = "torch.uint8 or torch.float8_e4m3fn"
WRONG = [
    (
        "query",
        zeros(BATCH, PADDED, 576),
        ValueError,
        "query must have shape [2, 8, 576], got [2, 32, 576]",
    ),
    (
        "query",
        zeros(BATCH, OWNER_HEADS, 576, dtype=torch.int8),
        TypeError,
        f"query must be {BYTES}, got torch.int8",
    ),
    ("kv", zeros(N, 656), ValueError, "kv must have shape [N, 576], got [5, 656]"),
    (
        "kv",
        zeros(2 * N, 576)[::2],
        ValueError,
        "kv must be contiguous with shape [N, 576], got strides [1152, 1]",
    ),
    (
        "rows",
        zeros(BATCH, 9, dtype=torch.int32),
        ValueError,
        "rows must have shape [>= 2, 8], got [2, 9]",
    ),
    ("valid", zeros(1, dtype=torch.int32), ValueError, "valid must have shape [>= 2], got [1]"),
    (
        "latent",
        zeros(BATCH, PADDED, 512, dtype=torch.bfloat16),
        ValueError,
        "latent must have shape [2, 8, 512], got [2, 32, 512]",
    ),
    (
        "lse",
        zeros(BATCH, OWNER_HEADS, dtype=torch.float64),
        TypeError,
        "lse must be torch.float32, got torch.float64",
    ),
    (
        "scale_log2",
        float("nan"),
        ValueError,
        "scale_log2 must be finite as a float32, got nan",
    ),
    ("out_scale", "1", TypeError, "out_scale must be a real number, got str"),
]


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG)
def test_a_wrong_argument_of_a_step(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    launch_step: Callable[..., None],
    stand_in: Callable[..., DcpMailbox],
) -> None:
    wrong = {**arguments(), name: value}
    with pytest.raises(error, match=exactly(says)):
        run_dcp(replace(KERNELS, step=launch_step), stand_in(), **wrong)


def _is_taken(name: str, says: str) -> bool:
    """Whether the launcher itself would take this value for the argument."""
    return "int8" in says or name in ("valid", "scale_log2", "out_scale")


TAKEN = [case for case in WRONG if _is_taken(case[0], case[3])]
REFUSED = [case for case in WRONG if not _is_taken(case[0], case[3])]


@pytest.mark.parametrize(("name", "value", "error", "says"), TAKEN)
def test_what_the_launcher_of_a_step_would_take(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    stand_in: Callable[..., DcpMailbox],
) -> None:
    with pytest.raises(error, match=exactly(says)):
        run_dcp(KERNELS, stand_in(), **{**arguments(), name: value})


def test_a_step_with_too_many_cache_rows(stand_in: Callable[..., DcpMailbox]) -> None:
    """A meta tensor has the size and no memory."""
    mailbox = stand_in()
    mailbox.device = torch.device("meta")
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    meta["kv"] = torch.empty(2**31, 576, dtype=torch.uint8, device="meta")
    says = exactly("kv must have at most 2147483647 rows (2^31 - 1), got 2147483648")
    with pytest.raises(ValueError, match=says):
        run_dcp(replace(KERNELS, device=mailbox.device), mailbox, **meta)


def test_an_error_of_the_launch_itself_is_not_swallowed(
    stand_in: Callable[..., DcpMailbox],
) -> None:
    tries: list[int] = []

    def fails(*_: object) -> None:
        tries.append(1)
        raise RuntimeError("CUDA")

    with pytest.raises(RuntimeError, match=r"^CUDA$"):
        run_dcp(replace(KERNELS, step=fails), stand_in(), **arguments())
    assert len(tries) == 1


def test_what_a_step_is_launched_with(stand_in: Callable[..., DcpMailbox]) -> None:
    launched: list[tuple] = []
    mailbox, named = stand_in(), arguments()
    run_dcp(replace(KERNELS, step=lambda *given: launched.append(given)), mailbox, **named)
    [given] = launched
    assert all(a is b for a, b in zip(given[:6], named.values(), strict=False))
    assert given[6:] == (0.1, 1.0, mailbox.arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch over no memory at all")
@pytest.mark.parametrize("case", [None, *REFUSED])
def test_what_the_launcher_of_a_step_checks(
    case: tuple | None,
    launch_step: Callable[..., None],
    on_gpu: Callable[..., object],
    stand_in: Callable[..., DcpMailbox],
) -> None:
    given = {name: on_gpu(value) for name, value in arguments().items()}
    if case is None:
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):  # past its checks, it finds no GPU
            launch_step(*given.values(), stand_in().arguments)
        return
    number = list(given).index(case[0])
    given[case[0]] = on_gpu(case[1])
    with pytest.raises(ValueError, match=rf"(?s)(Mismatched|Misaligned) .*argument #{number}"):
        launch_step(*given.values(), stand_in().arguments)


def _part(name: str) -> Callable[..., Any]:
    named = arguments()
    decoded = [named[n] for n in (*KEYS, "scale_log2", "out_scale")]
    parts: dict[str, Callable[..., Any]] = {
        "query_exchange": lambda k, m: query_exchange(k, m, named["query"]),
        "push_decode": lambda k, m: push_decode(k, m, *decoded),
        "owner_merge": lambda k, m: owner_merge(k, m, named["latent"], named["lse"]),
        "step": lambda k, m: run_dcp(k, m, **named),
    }
    return parts[name]


KEYS = ("kv", "rows", "valid")
PARTS = ("query_exchange", "push_decode", "owner_merge", "step")


@pytest.mark.parametrize("name", PARTS)
def test_wrong_kernels_and_mailboxes(name: str, stand_in: Callable[..., DcpMailbox]) -> None:
    part = _part(name)
    with pytest.raises(TypeError, match=r"^kernels must be what compile_dcp returned, got str$"):
        part("kernels", stand_in())
    with pytest.raises(TypeError, match=r"^mailbox must be a DcpMailbox, got None$"):
        part(KERNELS, None)
    says = f"mailbox must be as the kernels were compiled for, {BOX} on cpu, got "
    other = replace(BOX, cap=4)
    with pytest.raises(ValueError, match=exactly(f"{says}{other} on cpu")):
        part(KERNELS, stand_in(other))
    mailbox = stand_in()
    mailbox.device = torch.device("meta")
    with pytest.raises(ValueError, match=exactly(f"{says}{BOX} on meta")):
        part(KERNELS, mailbox)


@pytest.mark.parametrize("name", PARTS)
def test_a_lost_peer_is_named_before_anything_is_launched(
    name: str, stand_in: Callable[..., DcpMailbox]
) -> None:
    mailbox = stand_in(report=(Stage.PARTIAL, 0, 1, 7))
    with pytest.raises(PeerTimeoutError, match="rank 0's partial of row 1, head 7") as caught:
        _part(name)(KERNELS, mailbox)
    error = caught.value
    assert (error.waiting, error.rank, error.stage) == (1, 0, Stage.PARTIAL)
    assert (error.row, error.head, error.timeout_s) == (1, 7, 0.25)
    assert "rank 1 waited 0.25 s" in str(error)


@pytest.mark.parametrize(
    ("batch", "width", "error", "says"),
    [
        (4, WIDTH, ValueError, "cap must be at least batch, 4, got 3"),
        (0, WIDTH, ValueError, "batch must be 1 or more, got 0"),
        (1.0, WIDTH, TypeError, "batch must be an int, got 1.0 (float)"),
        (BATCH, 0, ValueError, "width must be 1 or more, got 0"),
        (BATCH, True, TypeError, "width must be an int, got True (bool)"),
        (BATCH, WIDTH, ValueError, "device must be a CUDA device, got cpu"),
    ],
)
def test_a_wrong_compile(
    batch: Any,
    width: Any,
    error: type[Exception],
    says: str,
    stand_in: Callable[..., DcpMailbox],
) -> None:
    with pytest.raises(error, match=exactly(says)):
        compile_dcp(stand_in(), batch, width)


def test_a_compile_without_a_mailbox() -> None:
    with pytest.raises(TypeError, match=r"^mailbox must be a DcpMailbox, got str$"):
        compile_dcp("mailbox", BATCH, WIDTH)  # type: ignore[arg-type]


def test_a_wrong_decode(stand_in: Callable[..., DcpMailbox]) -> None:
    named = arguments()
    del named["latent"], named["lse"]
    with pytest.raises(TypeError, match=r"^mailbox must be a DcpMailbox, got None$"):
        dcp_decode(None, **named)  # type: ignore[arg-type]
    says = exactly("query must have 3 dimensions, got shape [8, 576]")
    with pytest.raises(ValueError, match=says):
        dcp_decode(stand_in(), **{**named, "query": named["query"][0]})
    with pytest.raises(TypeError, match=r"^rows must be a torch.Tensor, got None$"):
        dcp_decode(stand_in(), **{**named, "rows": None})
