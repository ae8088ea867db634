"""Decode context parallelism for PyTorch: a rank's mailbox, and the launches of a step."""
