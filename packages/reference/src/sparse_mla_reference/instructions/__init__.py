"""GPU instructions and library functions, predicted to the last bit on arrays of any shape."""
