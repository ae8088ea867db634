"""Where the error comes from: one rounding at a time."""
