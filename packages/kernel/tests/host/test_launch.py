"""Every wrong argument of a launch is an error that names it, and nothing is launched.

``run_sparse`` leaves to the compiled launcher what that checks anyway. So the launcher is tested
too, with tensors that say that they are on a GPU: a computer without one launches nothing.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, SupportsFloat

import pytest
import torch

from sparse_mla_kernel import (
    BASE,
    LOW_LATENCY,
    Artifact,
    CompiledSparse,
    DcpMailbox,
    MailboxLayout,
    PeerTimeoutError,
    Schedule,
    run_sparse,
    sparse_decode,
)
from sparse_mla_kernel.host import launch as launch_module
from sparse_mla_kernel.mailbox.device import DeviceMailbox

BATCH, HEADS, PADDED, WIDTH, CAP, N = 2, 16, 32, 8, 3, 5


def _never(*_: object) -> None:
    pytest.fail("launched")


KERNEL = CompiledSparse(
    BATCH,
    HEADS,
    PADDED,
    WIDTH,
    CAP,
    torch.device("cpu"),
    BASE,
    Artifact("sm_90a", "", b""),
    _never,
)


def arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(CAP, PADDED, 576, dtype=torch.uint8),
        "kv": torch.zeros(N, 576, dtype=torch.float8_e4m3fn),
        "rows": torch.zeros(BATCH, WIDTH, dtype=torch.int32),
        "valid": torch.zeros(BATCH, dtype=torch.int32),
        "latent": torch.zeros(BATCH, PADDED, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(BATCH, PADDED),
        "scale_log2": 0.1,
        "out_scale": 1.0,
    }


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _is_taken(name: str, tensor: torch.Tensor) -> bool:
    """Whether the launcher itself would take this value for the argument."""
    short = name in ("rows", "valid") and len(tensor) < BATCH
    return short or tensor.dtype in (torch.int8, torch.uint32)


BYTES = "torch.uint8 or torch.float8_e4m3fn"
WRONG = [
    ("query", None, TypeError, "query must be a torch.Tensor, got None"),
    (
        "query",
        zeros(CAP, PADDED, 576, dtype=torch.int8),
        TypeError,
        f"query must be {BYTES}, got torch.int8",
    ),
    (
        "query",
        zeros(CAP, PADDED, 512),
        ValueError,
        "query must have shape [3, 32, 576], got [3, 32, 512]",
    ),
    (
        "query",
        zeros(CAP + 1, PADDED, 576),
        ValueError,
        "query must have shape [3, 32, 576], got [4, 32, 576]",
    ),
    (
        "query",
        zeros(CAP * PADDED, 576),
        ValueError,
        "query must have shape [3, 32, 576], got [96, 576]",
    ),
    (
        "query",
        zeros(CAP, 576, PADDED).mT,
        ValueError,
        "query must be contiguous with shape [3, 32, 576], got strides [18432, 1, 32]",
    ),
    (
        "query",
        zeros(CAP * PADDED * 576 + 8)[8:].view(CAP, PADDED, 576),
        ValueError,
        "query must start at a multiple of 16 bytes, got address ",
    ),
    ("kv", zeros(N, 656), ValueError, "kv must have shape [N, 576], got [5, 656]"),
    (
        "kv",
        zeros(2 * N, 576)[::2],
        ValueError,
        "kv must be contiguous with shape [N, 576], got strides [1152, 1]",
    ),
    (
        "kv",
        zeros(N, 576, dtype=torch.bfloat16),
        TypeError,
        f"kv must be {BYTES}, got torch.bfloat16",
    ),
    (
        "kv",
        torch.empty(N, 576, dtype=torch.uint8, device="meta"),
        ValueError,
        "kv must be on cpu, got meta",
    ),
    (
        "rows",
        zeros(BATCH, WIDTH, dtype=torch.int64),
        TypeError,
        "rows must be torch.int32, got torch.int64",
    ),
    (
        "rows",
        zeros(BATCH, WIDTH, dtype=torch.uint32),
        TypeError,
        "rows must be torch.int32, got torch.uint32",
    ),
    (
        "valid",
        zeros(BATCH, dtype=torch.uint32),
        TypeError,
        "valid must be torch.int32, got torch.uint32",
    ),
    ("valid", 3, TypeError, "valid must be a torch.Tensor, got int"),
    (
        "valid",
        zeros(BATCH, 1, dtype=torch.int32),
        ValueError,
        "valid must have shape [>= 2], got [2, 1]",
    ),
    (
        "valid",
        zeros(2 * BATCH, dtype=torch.int32)[::2],
        ValueError,
        "valid must be contiguous with shape [>= 2], got strides [2]",
    ),
    (
        "rows",
        zeros(BATCH, WIDTH + 1, dtype=torch.int32),
        ValueError,
        "rows must have shape [>= 2, 8], got [2, 9]",
    ),
    (
        "rows",
        zeros(BATCH - 1, WIDTH, dtype=torch.int32),
        ValueError,
        "rows must have shape [>= 2, 8], got [1, 8]",
    ),
    (
        "valid",
        zeros(BATCH - 1, dtype=torch.int32),
        ValueError,
        "valid must have shape [>= 2], got [1]",
    ),
    (
        "latent",
        zeros(BATCH, PADDED, 512, dtype=torch.float16),
        TypeError,
        "latent must be torch.bfloat16, got torch.float16",
    ),
    (
        "latent",
        zeros(BATCH, HEADS, 512, dtype=torch.bfloat16),
        ValueError,
        "latent must have shape [2, 32, 512], got [2, 16, 512]",
    ),
    ("latent", None, TypeError, "latent must be a torch.Tensor, got None"),
    (
        "lse",
        zeros(BATCH, PADDED, dtype=torch.float64),
        TypeError,
        "lse must be torch.float32, got torch.float64",
    ),
    (
        "lse",
        zeros(PADDED, BATCH, dtype=torch.float32).mT,
        ValueError,
        "lse must be contiguous with shape [2, 32], got strides [1, 2]",
    ),
    (
        "scale_log2",
        float("nan"),
        ValueError,
        "scale_log2 must be finite as a float32, got nan",
    ),
    ("scale_log2", 1e39, ValueError, "scale_log2 must be finite as a float32, got 1e+39"),
    ("scale_log2", -1e39, ValueError, "scale_log2 must be finite as a float32, got -1e+39"),
    ("scale_log2", True, TypeError, "scale_log2 must be a real number, got bool"),
    ("out_scale", "1", TypeError, "out_scale must be a real number, got str"),
    (
        "out_scale",
        float("-inf"),
        ValueError,
        "out_scale must be finite as a float32, got -inf",
    ),
]


def exactly(message: str) -> str:
    """A pattern of this message; an address at its end is left open."""
    rest = "0x[0-9a-f]+" if message.endswith("address ") else ""
    return f"^{re.escape(message)}{rest}$"


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG)
def test_wrong_argument(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    launch: Callable[..., None],
) -> None:
    with pytest.raises(error, match=exactly(says)):
        run_sparse(replace(KERNEL, launch=launch), **{**arguments(), name: value})


TAKEN = [
    *(case for case in WRONG if case[0] in ("scale_log2", "out_scale")),
    *(case for case in WRONG if isinstance(case[1], torch.Tensor) and _is_taken(*case[:2])),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), TAKEN)
def test_what_the_launcher_would_take(
    name: str, value: object, error: type[Exception], says: str
) -> None:
    """The launcher would launch with these arguments; they don't reach the launcher."""
    with pytest.raises(error, match=exactly(says)):
        run_sparse(KERNEL, **{**arguments(), name: value})


def test_right_arguments_are_launched_once() -> None:
    launched: list[tuple] = []
    kernel = replace(KERNEL, launch=lambda *given: launched.append(given))
    named = arguments()
    run_sparse(kernel, **named)
    [given] = launched
    assert [tuple(t.shape) for t in given[:6]] == [tuple(t.shape) for t in list(named.values())[:6]]
    assert [t.data_ptr() for t in given[:6]] == [t.data_ptr() for t in list(named.values())[:6]]
    assert (given[0].dtype, given[1].dtype) == (torch.uint8, torch.uint8)
    assert given[6:] == (0.1, 1.0)


@pytest.mark.parametrize("scale", [1, torch.tensor(0.5).numpy()[()], -3.4028234663852886e38])
def test_scales_of_other_types(scale: SupportsFloat) -> None:
    launched: list[tuple] = []
    kernel = replace(KERNEL, launch=lambda *given: launched.append(given))
    run_sparse(kernel, **{**arguments(), "out_scale": scale})
    assert launched[0][7] == float(scale)
    assert type(launched[0][7]) is float


def test_an_error_of_the_launch_itself_is_not_swallowed() -> None:
    tries: list[int] = []

    def fails(*_: object) -> None:
        tries.append(1)
        raise RuntimeError("CUDA")

    with pytest.raises(RuntimeError, match="CUDA"):
        run_sparse(replace(KERNEL, launch=fails), **arguments())
    assert len(tries) == 1


# ---- what the launcher checks -------------------------------------------------------------------


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would launch over no memory at all")


@no_gpu
def test_the_launcher_takes_right_arguments(
    launch: Callable[..., None], on_gpu: Callable[..., object]
) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)cuda"):  # past its checks, it finds no GPU
        launch(*map(on_gpu, arguments().values()))


@no_gpu
@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        *(
            (name, value, {})
            for name, value, _, says in WRONG
            if isinstance(value, torch.Tensor)
            and value.device.type == "cpu"
            and not says.endswith("address ")
            and not _is_taken(name, value)
        ),
        *((name, None, {"address": (1 << 20) + 8}) for name in ("query", "kv", "latent")),
        *((name, None, {"address": (1 << 20) + 2}) for name in ("rows", "valid", "lse")),
        *((name, None, {"device": 1}) for name in ("kv", "rows", "valid", "latent", "lse")),
    ],
)
def test_the_launcher_refuses(
    name: str,
    value: torch.Tensor | None,
    where: dict[str, int],
    launch: Callable[..., None],
    on_gpu: Callable[..., object],
) -> None:
    named = arguments()
    wrong = on_gpu(named[name] if value is None else value, **where)
    given = {key: on_gpu(right) for key, right in named.items()} | {name: wrong}
    argument = rf"(?s)(Mismatched|Misaligned) .*argument #{list(named).index(name)}"
    with pytest.raises((TypeError, ValueError), match=argument):
        launch(*given.values())


# ---- other entry points -------------------------------------------------------------------------


def test_wrong_kernel() -> None:
    with pytest.raises(TypeError, match=r"^kernel must be what compile_sparse returned, got str$"):
        run_sparse("kernel", **arguments())  # type: ignore[arg-type]


MANY = "kv must have at most 2147483647 rows (2^31 - 1), got 2147483648"


def test_too_many_cache_rows() -> None:
    """A meta tensor has the size and no memory."""
    kernel = replace(KERNEL, device=torch.device("meta"))
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    meta["kv"] = torch.empty(2**31, 576, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=exactly(MANY)):
        run_sparse(kernel, **meta)


def test_decode_needs_a_cuda_device() -> None:
    named = arguments()
    with pytest.raises(ValueError, match=r"^device must be a CUDA device, got cpu$"):
        sparse_decode(
            named["query"],
            named["kv"],
            named["rows"],
            named["valid"],
            scale_log2=0.1,
            out_scale=1.0,
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("query", "query must have 3 dimensions, got shape [32, 576]"),
        ("rows", "rows must have 2 dimensions, got shape [8]"),
    ],
)
def test_decode_with_a_missing_dimension(name: str, says: str) -> None:
    named = arguments()
    named[name] = named[name][0]
    with pytest.raises(ValueError, match=exactly(says)):
        sparse_decode(
            named["query"],
            named["kv"],
            named["rows"],
            named["valid"],
            scale_log2=0.1,
            out_scale=1.0,
        )


# ---- sparse_decode, with a stand-in for the compiled kernel --------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The sizes and schedules that kernels were asked for; the kernels write ones."""

    def known(*sizes: Any, schedule: Schedule) -> CompiledSparse:
        asked.append((*sizes, schedule))
        batch, heads, padded, width, cap, device = sizes
        return replace(
            KERNEL,
            batch=batch,
            heads=heads,
            padded=padded,
            width=width,
            cap=cap,
            device=device,
            schedule=schedule,
            launch=write,
        )

    def write(*given: Any) -> None:
        for out in given[4:6]:
            out[:, : asked[-1][1]] = 1.0

    asked: list[tuple] = []
    monkeypatch.setattr(launch_module, "_known", known)
    return asked


def decode(**change: Any) -> tuple[torch.Tensor, torch.Tensor]:
    named = arguments() | {"scale_log2": 0.1, "out_scale": 1.0} | change
    return sparse_decode(**{name: x for name, x in named.items() if name not in ("latent", "lse")})


def test_decode_allocates_the_results(asked: list[tuple]) -> None:
    named = {"rows": zeros(CAP, WIDTH, dtype=torch.int32), "valid": zeros(CAP, dtype=torch.int32)}
    latent, lse = decode(**named)
    assert asked == [(CAP, PADDED, PADDED, WIDTH, CAP, torch.device("cpu"), BASE)]
    assert (latent.shape, latent.dtype) == ((CAP, PADDED, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((CAP, PADDED), torch.float32)
    assert (latent == 1).all()
    assert (lse == 1).all()


def test_heads_that_are_not_used(asked: list[tuple]) -> None:
    """They have a row of zeros and an LSE of minus infinity; the kernel does not write them."""
    named = {"rows": zeros(CAP, WIDTH, dtype=torch.int32), "valid": zeros(CAP, dtype=torch.int32)}
    latent, lse = decode(**named, heads=HEADS, schedule=LOW_LATENCY)
    assert asked == [(CAP, HEADS, PADDED, WIDTH, CAP, torch.device("cpu"), LOW_LATENCY)]
    assert (latent[:, :HEADS] == 1).all()
    assert (lse[:, :HEADS] == 1).all()
    assert latent[:, HEADS:].view(torch.int16).unique().tolist() == [0]
    assert lse[:, HEADS:].unique().tolist() == [-torch.inf]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 16.0}, "heads must be an int, got 16.0 (float)"),
        ({"heads": True}, "heads must be an int, got True (bool)"),
        (
            {"schedule": "base"},
            "schedule must be a sparse_mla_kernel.Schedule, got builtins.str",
        ),
    ],
)
def test_what_equals_a_known_size_is_still_refused(
    change: dict[str, object], says: str, asked: list[tuple]
) -> None:
    with pytest.raises(TypeError, match=exactly(says)):
        decode(**change)
    assert asked == []


# ---- push mode ----------------------------------------------------------------------------------

PUSHED = replace(KERNEL, push=(8, 2, CAP))
GIVEN = {
    "query": "query must be None in push mode, got Tensor",
    "latent": "latent must be None in push mode, got Tensor",
    "lse": "lse must be None in push mode, got Tensor",
}


def push_arguments() -> dict[str, Any]:
    return arguments() | dict.fromkeys(GIVEN)


def test_push_mode_needs_a_mailbox() -> None:
    says = exactly("push must be this rank's DcpMailbox, got None")
    for given in (push_arguments(), arguments()):
        with pytest.raises(TypeError, match=says):
            run_sparse(PUSHED, **given)


def test_latent_mode_takes_no_mailbox(stand_in: Callable[..., DcpMailbox]) -> None:
    says = exactly("push must be None for a kernel compiled without push, got StandIn")
    with pytest.raises(ValueError, match=says):
        run_sparse(KERNEL, **arguments(), push=stand_in())


@pytest.mark.parametrize("change", [{"cap": 9}, {"padded": 48}, {"owner_heads": 4, "ranks": 4}])
def test_a_mailbox_of_another_layout(
    change: dict[str, int], stand_in: Callable[..., DcpMailbox]
) -> None:
    box = MailboxLayout(PADDED, 8, 2, CAP)
    other = replace(box, **change)
    with pytest.raises(ValueError, match=exactly(f"push must be {box} on cpu, got {other} on cpu")):
        run_sparse(PUSHED, **push_arguments(), push=stand_in(other))


def test_a_mailbox_on_another_device(stand_in: Callable[..., DcpMailbox]) -> None:
    mailbox = stand_in()
    mailbox.device = torch.device("meta")
    with pytest.raises(
        ValueError, match=exactly(f"push must be {mailbox.box} on cpu, got {mailbox.box} on meta")
    ):
        run_sparse(PUSHED, **push_arguments(), push=mailbox)


@pytest.mark.parametrize("name", GIVEN)
def test_push_mode_takes_no_query_and_no_results(
    name: str, stand_in: Callable[..., DcpMailbox]
) -> None:
    given = push_arguments() | {name: arguments()[name]}
    with pytest.raises(ValueError, match=exactly(GIVEN[name])):
        run_sparse(PUSHED, **given, push=stand_in())


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [case for case in WRONG if case[0] in ("kv", "rows", "valid", "scale_log2", "out_scale")],
)
def test_a_wrong_argument_in_push_mode(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    stand_in: Callable[..., DcpMailbox],
) -> None:
    with pytest.raises(error, match=exactly(says)):
        run_sparse(PUSHED, **push_arguments() | {name: value}, push=stand_in())


def test_a_lost_peer_is_named_before_the_launch(stand_in: Callable[..., DcpMailbox]) -> None:
    with pytest.raises(
        PeerTimeoutError, match=r"^rank 1 waited 0.25 s for rank 0's query of row 0"
    ):
        run_sparse(PUSHED, **push_arguments(), push=stand_in(report=(1, 0, 0, 0)))


def test_what_push_mode_launches_with(stand_in: Callable[..., DcpMailbox]) -> None:
    seen: list[Any] = []
    mailbox, named = stand_in(), push_arguments()
    run_sparse(replace(PUSHED, launch=lambda *given: seen.extend(given)), **named, push=mailbox)
    assert seen[0].data_ptr() == named["kv"].data_ptr()
    assert seen[0].dtype is torch.uint8
    assert seen[1] is named["rows"]
    assert seen[2] is named["valid"]
    assert seen[3:] == [0.1, 1.0, mailbox.arguments]
    assert [type(x) for x in seen[3:]] == [float, float, DeviceMailbox]
