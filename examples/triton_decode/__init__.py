"""A Triton FP8 decode-attention kernel, predicted to the last bit."""
