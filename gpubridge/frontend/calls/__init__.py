"""The door for models: their calls of other models, from the stubs they run in."""
