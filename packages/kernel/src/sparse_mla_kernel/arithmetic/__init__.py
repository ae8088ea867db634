"""The contract's scalar steps, which all kernels share."""
