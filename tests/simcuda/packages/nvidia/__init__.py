"""A namespace: other packages of the same name are found beside this one."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
