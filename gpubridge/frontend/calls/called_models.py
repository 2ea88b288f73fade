"""The models that others call: what looking them up gave is remembered until models change."""

from __future__ import annotations

from collections.abc import Iterator

from gpubridge.engine.instance import Instance
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, ErrorCode


class CalledModels:
    """Finds models by name; who knows of changes says so.

    ``repository``: where the models are.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._found: dict[tuple[str, int], Model] = {}
        self._versions: dict[str, list[Model]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._found.clear()
        self._versions.clear()

    def find(self, name: str, version: int) -> Model:
        """Return the model that a call is for; its highest version for -1.

        Raises BridgeError when it is not there, in Triton's words.
        """
        found = self._found.get((name, version))
        if found is not None:
            return found
        try:
            found = self._repository.find(name, None if version == -1 else version)
        except BridgeError:
            raise BridgeError(
                f"Failed for execute the inference request. Model '{name}' is not ready.",
                ErrorCode.NOT_FOUND,
            ) from None
        self._found[name, version] = found
        return found

    def instances(self, name: str) -> Iterator[Instance]:
        """The instances of all versions of a model."""
        models = self._versions.get(name)
        if models is None:
            find = self._repository.find
            models = [find(name, version) for version in self._repository.versions(name)]
            self._versions[name] = models
        for model in models:
            yield from model.instances
