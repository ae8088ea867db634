"""What the kernel is compared with for speed and conventions, and the inputs that all are given.

Importing the package imports neither PyTorch nor the DSL.
"""
