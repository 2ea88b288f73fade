"""Memory of requests: arenas of models, and regions that clients have registered."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.engine.client_regions import ClientPlace, ClientRegions, RegionUse
from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Account, Body
from gpubridge.protocol.grpc.receiver import RequestReceiver
from gpubridge.protocol.request_form import RequestRegions, SharedRegion
from gpubridge.request import NO_BYTES, InferRequest, MemoryRange


class RequestMemory:
    """Arenas of models, and registered client memory."""

    def __init__(self, arenas: Regions, regions: ClientRegions) -> None:
        self.arenas = arenas
        self.regions = regions

    def receiver(
        self, nbytes: int, account: Account, refuse: Callable[[BridgeError], None]
    ) -> RequestReceiver:
        """Return the receiver of a large gRPC message; see `Body` for the other parameters."""
        body = Body(self.arenas.budget, account, refuse)
        return RequestReceiver(nbytes, self.arenas.known_arena, body)

    def check(self, region: SharedRegion) -> None:
        """Raise BridgeError if a range of client memory is not registered."""
        _place(region, self.regions)

    def share(self, request: InferRequest, given: RequestRegions, model: str) -> None:
        """Resolve the inputs and outputs of a request that are in the client's memory.

        ``request``: has the places of all other inputs, and is not submitted yet.

        Raises BridgeError, after freeing the request's slot, if a region is no longer registered.
        """
        try:
            _share(request, given, self.regions)
        except Exception:
            if request.slot is not None:
                self.arenas.arena(model).free(request.slot)
            raise


def _share(request: InferRequest, given: RequestRegions, regions: ClientRegions) -> None:
    used: list[ClientPlace] = []
    ranges: list[MemoryRange] = []
    inside: list[int] = []
    sent = iter(request.places)
    for index, region in enumerate(given.inputs):
        if region is None:
            ranges.append(_sent_range(request, *next(sent)))
            continue
        place = _place(region, regions)
        used.append(place)
        inside.append(index)
        ranges.append(MemoryRange(place.region.segment, place.offset, place.nbytes, None))
    outputs = {}
    for name, region in given.outputs.items():
        place = _place(region, regions)
        used.append(place)
        outputs[name] = place.region.segment.region, place.offset, place.nbytes
    request.ranges = ranges
    request.client = RegionUse(used, tuple(outputs))
    request.context = request.context.changed(client={"in": inside, "out": outputs})


def _place(region: SharedRegion, regions: ClientRegions) -> ClientPlace:
    return regions.place(region.name, region.offset, region.nbytes)


def _sent_range(request: InferRequest, at: int, nbytes: int) -> MemoryRange:
    slot = request.slot
    if slot is None or not nbytes:
        return NO_BYTES
    return MemoryRange(slot.segment, slot.offset + request.start + at, nbytes, None)
