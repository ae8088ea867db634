"""What an implementation of the decode must offer to be timed: ours, FlashMLA, PyTorch, a floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sparse_mla_verify.peers.workload import Workload

Call = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Prepared:
    """An implementation ready for a point: call k works on input set k.

    Everything that does not depend on the data is done before: allocation, conversion of the
    inputs to the implementation's formats, scheduling metadata. latent `[calls, B, H, 512]` is
    where the calls write; None if they compute nothing.
    """

    calls: Sequence[Call]
    latent: torch.Tensor | None = None
    notes: Mapping[str, object] = field(default_factory=dict)


class Implementation(Protocol):
    """Something that decodes."""

    @property
    def name(self) -> str:
        """Its name in tables and in the JSON, where its times are `<name>_us`."""

    def prepare(self, work: Workload) -> Prepared:
        """Get ready for a point."""
