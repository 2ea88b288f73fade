"""The name under which models know `gpubridge.pb_utils`.

A package and not a module, because only packages can be marked as typed. In a stub of a Triton that
has gpubridge on its path, it is Triton's own module of that name.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder

if "c_python_backend_utils" in sys.builtin_module_names:
    # Only the interpreter of Triton's stub has that built in; its own module is no package.
    _found = (PathFinder.find_spec(__name__, [entry]) for entry in sys.path)
    _own = next(spec for spec in _found if spec and spec.submodule_search_locations is None)
    sys.modules[__name__] = importlib.util.module_from_spec(_own)
    _own.loader.exec_module(sys.modules[__name__])  # type: ignore[union-attr]
else:
    from gpubridge.pb_utils import *
    from gpubridge.pb_utils import __all__ as __all__
