"""Logs, metrics, statistics and traces of the server."""
