"""Work in other processes: over all cores, or with a patched copy of the kernel's package."""
