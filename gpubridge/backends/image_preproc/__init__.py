"""JPEG files to tensors for vision models, configured by parameters alone."""
