"""A simulated CUDA driver: a test double of libcuda.so.1, with a machine of two devices behind it."""
