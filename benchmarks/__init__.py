"""Side-by-side measurements of gpubridge and Triton on one machine, in one run."""
