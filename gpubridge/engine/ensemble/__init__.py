"""Ensembles: models that are made of other models, a graph through which tensors flow."""
