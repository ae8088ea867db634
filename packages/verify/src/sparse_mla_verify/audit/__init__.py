"""The claims, how each is decided, and the reports."""
