"""A mix of everything for a long time, while stubs are killed: what became of each request."""
