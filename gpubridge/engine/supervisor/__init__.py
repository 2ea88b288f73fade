"""Stub processes: start, configuration, readiness, restart and end."""
