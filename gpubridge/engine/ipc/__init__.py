"""Connections to stubs: messages, requests in flight, decoded responses."""
