"""Fixtures of the schedulers' tests: requests that no stub executes, and twins of schedulers."""

from gpubridge.engine.scheduling.scheduler import (
    BatchScheduler,
    late_error,
    queue_full,
    stopping_error,
)
from gpubridge.engine.scheduling.settings import DynamicBatching, ShapeAgreement
from gpubridge.errors import BridgeError
from gpubridge.request import RequestOptions

__all__ = ["Recorded", "Request", "default", "dynamic_scheduler"]

_STOPPED = 2
_AGREEMENT = ShapeAgreement(frozenset({"IN"}), same_inputs=False)


class Request:
    """A request, as far as the default queue and the dynamic batcher look at it."""

    def __init__(self, name, size=1, shape=0, priority=0, timeout_us=0, identifier=""):
        self.name = name
        self.batch_size = size
        self.shape = shape
        self.options = RequestOptions(priority, timeout_us, shapes=(("IN", (size, shape)),))
        self.identifier = identifier
        self.arrived = 0

    def copy(self):
        options = self.options
        return Request(
            self.name,
            self.batch_size,
            self.shape,
            options.priority,
            options.timeout_us,
            self.identifier,
        )


def default():
    """Return the scheduler of a model that asks for none."""
    return Scheduled(DynamicBatching(), 0, _AGREEMENT)


def dynamic_scheduler(settings, max_batch_size):
    """Return a dynamic batcher for requests of one input whose shape may vary."""
    return Scheduled(settings, max_batch_size, _AGREEMENT)


class Scheduled(BatchScheduler):
    """Adds and takes requests as the compiled dispatch does, and refuses as its owner does."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.take = self.batcher.take
        self.take_ahead = self.batcher.take_ahead
        self.next_wakeup = self.batcher.next_wakeup

    def add(self, request, now_ns):
        request.arrived = now_ns
        options = request.options
        shape = 0 if self.shapes is None else self.shapes.of(options)
        limits = options.priority, options.timeout_us
        admission = self.batcher.add(request, request.batch_size, shape, *limits, now_ns)
        if admission:
            raise stopping_error() if admission == _STOPPED else queue_full(request)

    def refused(self, now_ns):
        return [(request, late_error()) for request in self.batcher.refused(now_ns)]


class Recorded:
    """A scheduler that remembers what was done to it, so that twins of it can be made.

    Parameters
    ----------
    make : callable
        Makes a scheduler without items.
    copy : callable
        Copies an item that no scheduler has had yet.
    """

    def __init__(self, make, copy):
        self._make, self._copy = make, copy
        self._scheduler = make()
        self._calls = []
        self._blank = {}

    def __getattr__(self, name):
        value = getattr(self._scheduler, name)
        if not callable(value) or name in ("next_wakeup", "twin"):
            return value

        def call(*arguments):
            if name == "add":
                self._blank[arguments[0]] = self._copy(arguments[0])
            self._calls.append((name, tuple(_frozen(argument) for argument in arguments)))
            return value(*arguments)

        return call

    def twin(self):
        """Return a scheduler of its own in the same state, with copies of the items."""
        scheduler = self._make()
        items = {item: self._copy(blank) for item, blank in self._blank.items()}
        for name, arguments in self._calls:
            try:
                getattr(scheduler, name)(*(_replaced(argument, items) for argument in arguments))
            except BridgeError:
                continue
        return scheduler


def _frozen(argument):
    return tuple(argument) if isinstance(argument, list) else argument


def _replaced(argument, items):
    if isinstance(argument, tuple):
        return [items.get(item, item) for item in argument]
    return items.get(argument, argument)
