"""The latency benchmark: `sparse-mla-audit bench`.

Importing the package imports neither PyTorch nor the DSL.
"""
