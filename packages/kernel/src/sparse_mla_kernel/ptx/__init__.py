"""Inline PTX by kind, with one instruction in each function. Nothing here knows of attention."""
