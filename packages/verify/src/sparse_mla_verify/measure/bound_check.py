"""Whether results keep the bounds that the reference derives for each element.

The bound is on |result - exact answer|. It follows from the roundings of the arithmetic contract
and the data of the element's own row, and is not fitted to results (`sparse_mla_reference.bounds`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import Machine
from sparse_mla_reference.bounds import bounds
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.bits import values_of


@dataclass(frozen=True)
class BoundCheck:
    """How many elements lie outside their bound, and how much of it the others use.

    `unbounded` counts elements whose bound is infinite or NaN although the exact answer is finite.
    They pass. Where the exact answer is NaN or infinite, the result must be the same, and an
    element with another result counts as `outside`.
    """

    elements: int = 0
    outside: int = 0
    unbounded: int = 0
    worst_share: float = 0.0  # of the bound, over the elements inside theirs
    first: tuple[str, ...] = ()

    def __add__(self, other: "BoundCheck") -> "BoundCheck":
        return BoundCheck(
            self.elements + other.elements,
            self.outside + other.outside,
            self.unbounded + other.unbounded,
            max(self.worst_share, other.worst_share),
            (self.first + other.first)[:3],
        )


def check_bounds(
    case: Case,
    bits: tuple[NDArray[np.uint16], NDArray[np.uint32]],
    exact: tuple[NDArray[np.float64], NDArray[np.float64]],
    machine: Machine,
) -> BoundCheck:
    """Hold latent and lse of a case, as encodings, against the bounds on them."""
    limit = bounds(**case.arguments, schedule=REFERENCE[case.schedule], machine=machine)
    latent, lse = (values_of(array) for array in bits)
    return within(f"{case.name} latent", latent, exact[0], limit.latent) + within(
        f"{case.name} lse", lse, exact[1], limit.lse
    )


def within(
    what: str,
    got: NDArray[np.float64],
    exact: NDArray[np.float64],
    bound: NDArray[np.float64],
) -> BoundCheck:
    """Hold values of any shape against exact values and the bounds on their difference."""
    finite = np.isfinite(exact)
    same = (got == exact) | (np.isnan(got) & np.isnan(exact))
    free = finite & ~np.isfinite(bound)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - exact)
        inside = np.where(finite, free | (error <= bound), same)
    share = _share(error, bound)[finite & inside & ~free]
    where = np.argwhere(~inside)
    return BoundCheck(
        elements=got.size,
        outside=len(where),
        unbounded=int(free.sum()),
        worst_share=float(share.max(initial=0.0)),
        first=tuple(_words(what, tuple(i), got, exact, bound) for i in where[:3]),
    )


def _share(error: NDArray[np.float64], bound: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0.0, 0.0, error / bound)


def _words(what: str, index: Any, got: Any, exact: Any, bound: Any) -> str:
    at = ", ".join(map(str, index))
    return f"{what}[{at}]: {got[index]:.9g}, exact {exact[index]:.9g}, bound {bound[index]:.3g}"
