"""The image kernel without a GPU: its own source on a processor, and its arithmetic in NumPy."""
