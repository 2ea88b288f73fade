"""Other servers of Python models beside gpubridge and Triton, in environments of their own."""
