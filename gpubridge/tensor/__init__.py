"""Tensors as data: datatypes, the BYTES codec, DLPack capsules and host copies.

Runs in stub processes too, so it needs nothing but Python 3.9 and NumPy 1.22.
"""
