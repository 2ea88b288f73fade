"""A simulation of fleets of 8 to 1,000 GPUs, and the measurement that calibrates it."""
