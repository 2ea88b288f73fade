"""Runs one model without a server, in the developer's own process, for any debugger."""
