"""The backends that are shipped: each is a ``model.py`` that runs many models, told by their files.

They run in stub processes, as models do; the server never imports them.
"""
