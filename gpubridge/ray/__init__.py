"""A fleet of servers: Ray Serve places and checks them, HAProxy passes requests on to them.

``gpubridge.ray:build_app`` is the import path of the Serve application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application of a fleet; ``args``: see `FleetSettings`.

    Raises BridgeError: an argument is wrong, or Ray is not installed.
    """
    from gpubridge.ray.settings import FleetSettings, require_ray  # noqa: PLC0415  (Ray, where it is used)

    settings = FleetSettings.from_args(args)
    require_ray()
    from gpubridge.ray.deployment import server_deployment  # noqa: PLC0415

    return server_deployment().bind(settings)
