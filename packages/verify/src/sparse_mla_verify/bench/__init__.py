"""The latency benchmark: `python -m sparse_mla_verify.bench`.

Importing the package imports neither PyTorch nor the DSL.
"""
