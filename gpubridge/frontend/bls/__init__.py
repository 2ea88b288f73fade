"""Serves the stubs of models: their calls of other models, and what they ask of the server (BLS)."""
