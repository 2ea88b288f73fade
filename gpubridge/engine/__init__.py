"""Models, their instances, and the processes that run them."""
