"""Push mode: steps under decode context parallelism, on one GPU or several, bit for bit.

`cases` needs the reference alone; `emulated`, `check`, `group` and `bench` need GPUs.
"""
