"""BLS: calls of models by models, and control requests of models."""
