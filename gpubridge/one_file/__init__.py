"""Models that a Python file declares with ``@gpubridge.model``."""
