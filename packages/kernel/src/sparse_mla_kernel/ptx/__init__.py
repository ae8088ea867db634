"""Inline PTX by kind, one instruction a function. Nothing here knows of attention."""
