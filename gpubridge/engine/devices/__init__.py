"""GPUs: arenas, copies, shared events and the order of device work."""
