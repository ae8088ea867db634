"""Number formats: one table-driven format (``minifloat``) and the four that the kernel meets."""
