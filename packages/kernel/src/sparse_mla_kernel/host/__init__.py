"""The host side: what is compiled, kept on disk, launched and offered to PyTorch."""
