"""The name under which models know `gpubridge.pb_utils`.

A package and not a module, because only packages can be marked as typed.
"""

from gpubridge.pb_utils import *
from gpubridge.pb_utils import __all__ as __all__
