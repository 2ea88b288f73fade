"""Ensembles: graphs of models through which tensors flow."""
