"""The name under which models know `gpubridge.pb_utils.c_module`.

A package and not a module, because only packages can be marked as typed.
"""

from gpubridge.pb_utils.c_module import *
from gpubridge.pb_utils.c_module import __all__ as __all__
