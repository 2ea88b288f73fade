"""The backends that are shipped: each is a ``model.py`` that runs the models of a file format.

They run in stub processes, as models do; the server never imports them.
"""
