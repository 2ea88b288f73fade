"""``gpubridge bench``: figures that a user can take on his own machine."""
