"""Tensor data: datatypes, the BYTES codec, DLPack and other exchange with frameworks.

Runs in stub processes too, so it needs nothing but Python 3.9 and NumPy 1.22.
"""
