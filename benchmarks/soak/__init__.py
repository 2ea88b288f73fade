"""Mixed traffic for a long time, while stubs are killed; checks the outcome of each request."""
