"""Settings of a server, by the names of their groups and fields."""

from dataclasses import fields
from pathlib import Path

from gpubridge.config import ServerSettings

_KINDS = {each.name: each.metadata.get("flags") for each in fields(ServerSettings)}


def server_settings(changes=None, repositories=(Path("models"),)):
    """Return the settings with some changes, such as ``{"http.port": 0}``."""
    groups = {}
    for name, value in {"repository.model_repositories": repositories, **(changes or {})}.items():
        group, _, field = name.partition(".")
        groups.setdefault(group, {})[field] = value
    return ServerSettings(**{group: _KINDS[group](**given) for group, given in groups.items()})
