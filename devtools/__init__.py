"""The program behind ``./dev``: what one does with a checkout.

It runs before anything is installed, so it needs the standard library of Python 3.10 alone.
"""
