"""Contents of a request, in a form that can be compared."""

from __future__ import annotations

__all__ = ["said_of"]


def said_of(request):
    """Return all that a model and its scheduler are told of a request, its inputs excepted."""
    options = request.options
    return (
        *(request.signature, request.dims, request.identifier, request.context.encoded()),
        *(request.batch_size, options.priority, options.timeout_us, options.correlation_id),
        *(options.start, options.end, [(name, tuple(shape)) for name, shape in options.shapes]),
    )
