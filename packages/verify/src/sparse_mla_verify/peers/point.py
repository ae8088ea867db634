"""What is timed: a batch of one shape."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Point:
    """A batch: decode rows, query heads, and the keys of each row."""

    rows: int
    heads: int
    keys: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.heads} x {self.keys}"
