"""Numbers for the shapes that requests of one batch must have in common."""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

from gpubridge.engine.scheduling.settings import ShapeAgreement
from gpubridge.request import RequestOptions

__all__ = ["ShapeIds"]


class _ShapeId:
    """A number, for as long as options of requests refer to it."""

    __slots__ = ("__weakref__", "number", "owner")

    def __init__(self, number: int, owner: ShapeIds) -> None:
        self.number = number
        self.owner = owner


class ShapeIds:
    """Gives one model's requests equal numbers if their shapes let them share a batch.

    Parameters
    ----------
    agreement : ShapeAgreement
        Says which inputs must agree.
    """

    __slots__ = ("_agreement", "_ids", "_numbers")

    def __init__(self, agreement: ShapeAgreement) -> None:
        self._agreement = agreement
        self._ids: WeakValueDictionary[object, _ShapeId] = WeakValueDictionary()
        self._numbers = itertools.count()

    def of(self, options: RequestOptions) -> int:
        """Return the number of a request's shapes; options, mostly shared ones, remember it."""
        if not self._agreement.inputs and not self._agreement.same_inputs:
            return 0
        known = options.shape_id
        if isinstance(known, _ShapeId) and known.owner is self:
            return known.number
        key = self._key(options)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = _ShapeId(next(self._numbers), self)
        options.shape_id = found
        return found.number

    def _key(self, options: RequestOptions) -> object:
        agreement = self._agreement
        return tuple(
            (name, shape[1:] if name in agreement.inputs else None)
            for name, shape in sorted(options.shapes)
            if agreement.same_inputs or name in agreement.inputs
        )
