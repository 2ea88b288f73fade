"""The work floor: models, their instances, and the processes that run them."""
