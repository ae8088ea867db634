"""The stage trace: each stage of a kernel, stored by a debug build, against the reference."""
