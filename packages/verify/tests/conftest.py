from collections.abc import Callable

import numpy as np
import pytest

from sparse_mla_verify.audit.collect import cross_compiled
from sparse_mla_verify.evidence.recordings import (
    SYNTHETIC,
    Check,
    Host,
    Outcome,
    Recording,
    arrays_of,
    recorded,
)
from sparse_mla_verify.inputs.cases import Case, all_cases
from sparse_mla_verify.measure.poisoned import run_poisoned
from sparse_mla_verify.measure.predict import predict

Fault = Callable[[np.ndarray, np.ndarray], None]


class StandIn:
    """A runner that writes what the reference predicts, then plants a fault in the buffers."""

    def __init__(self, fault: Fault = lambda latent, lse: None) -> None:
        self.fault = fault

    def __call__(self, case: Case, latent: np.ndarray, lse: np.ndarray) -> None:
        own = (slice(case.batch), slice(case.heads))
        latent[own], lse[own] = predict(case)
        self.fault(latent, lse)


@pytest.fixture(scope="session")
def stand_in() -> type[StandIn]:
    return StandIn


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}


@pytest.fixture(scope="session")
def few(cases: dict[str, Case]) -> list[Case]:
    """Three cheap cases: plain rows, empty and short rows, NaN in a key and a query."""
    nan, short = cases["nan-used/keys-and-query"], cases["counts/short"]
    return [
        cases["head-counts/16"],
        short.only(slice(4)),
        nan.only(slice(2, 4)),
    ]


@pytest.fixture(scope="session")
def synthetic(few: list[Case]) -> Recording:
    """A recording of the stand-in: it has the form of a recording and says nothing of a kernel."""
    outputs = [run_poisoned(StandIn(), case) for case in few]
    unknown = ["none"] * 7
    host = Host("2000-01-01", "no GPU: synthetic", 0, "sm_90", *unknown)
    pairs = list(zip(few, outputs, strict=True))
    return Recording(
        source=SYNTHETIC,
        host=host,
        machine_code={"b1-h16-p16-w1-c1": "no machine code: synthetic"},
        cases=tuple(recorded(case, output) for case, output in pairs),
        checks=(Check("graph-replay", "Synthetic.", 1, 0),),
        outcomes=(Outcome("latent-bits", "Synthetic.", "bit-exact", "pass", "0 of 0"),),
        arrays={k: v for case, output in pairs for k, v in arrays_of(case, output).items()},
    )


@pytest.fixture(scope="session")
def artifact(cases: dict[str, Case], compiles: None):
    return cross_compiled(cases["normal/checkpoint"].signature, "sm_90a")
