"""Calls of other models (BLS) from a stub."""
