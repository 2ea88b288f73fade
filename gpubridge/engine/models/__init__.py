"""Loaded models, each of which dispatches its requests to its instances."""
