"""What decides the order of rounding, and which kernel runs it: data alone."""

from sparse_mla_kernel.schedule.schedule import (
    BASE,
    LATENT_COLUMNS,
    LOW_LATENCY,
    ROW_COLUMNS,
    TILE_HEADS,
    Schedule,
)

__all__ = ["BASE", "LATENT_COLUMNS", "LOW_LATENCY", "ROW_COLUMNS", "TILE_HEADS", "Schedule"]
