"""The GPU of a stub: its memory, the streams on it, and what goes there and comes from there."""
