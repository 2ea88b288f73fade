"""A model's call as a request for the model that it calls."""

from __future__ import annotations

from typing import Any

from gpubridge.engine.model import Model
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.protocol.infer_request import make_form
from gpubridge.protocol.request_form import InputForm, OutputForm, RequestForm
from gpubridge.request import NO_CONTEXT, RequestOptions
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature

_KEPT = 512
_START, _END = 1, 2


class CallForms:
    """What signatures of calls mean to the models that are called; bounded."""

    def __init__(self) -> None:
        # Those of calls that say no more: a device for each GPU, so there are few.
        self._contexts: dict[tuple[bool, str], RequestContext] = {}
        self._known: dict[Any, tuple[Signature, list[int], RequestForm]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._known.clear()

    def read(
        self, record: Record, model: Model, device: str
    ) -> tuple[RequestForm, RequestContext, RequestOptions]:
        """Return what a call asks for, the context for the called stub, and the scheduler's options.

        ``device``: the UUID of the GPU on which the caller's outputs can stay; empty for none.

        Raises BridgeError: in Triton's words, when it is no valid request for the model.
        """
        said: CallContext = record.context
        form = self._form(record, model)
        if not (said.flags or said.correlation or said.timeout or said.parameters):
            key = said.handed_on, device
            context = self._contexts.get(key)
            if context is None:
                context = RequestContext(shared=said.handed_on, device=device)
                self._contexts[key] = context
            return form, context, form.options
        context = RequestContext(
            flags=said.flags,
            correlation_id=said.correlation_id,
            correlation_text=said.correlation_text,
            timeout=said.timeout,
            parameters=said.parameters,
            shared=said.handed_on,
            device=device,
        )
        return form, context, _options(said, form)

    def _form(self, record: Record, model: Model) -> RequestForm:
        signature = record.signature
        key = id(signature), record.shapes, model
        known = self._known.get(key)
        sizes = [ref[2] for ref in record.refs]
        if known is not None and known[1] == sizes:
            return known[2]
        names = model.config.outputs_by_name
        for name in signature.requested:
            if name not in names:
                raise BridgeError(
                    f"unexpected inference output '{name}' for model '{model.name}'",
                    ErrorCode.INVALID_ARG,
                )
        inputs = [
            InputForm(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(signature.tensors, record.shapes, sizes, strict=True)
        ]
        outputs = {name: OutputForm(True) for name in signature.requested} or None
        form = make_form(
            record.identifier, inputs, outputs, True, NO_CONTEXT, RequestOptions(), model.config
        )
        if not record.identifier:
            if len(self._known) >= _KEPT:
                self._known.clear()
            # The signature is held, so that nothing else gets its address.
            self._known[key] = signature, sizes, form
        return form


def _options(said: CallContext, form: RequestForm) -> RequestOptions:
    if said.correlation_text:
        text_of_sequence(said.correlation_text)
    return RequestOptions(
        0,
        said.timeout,
        said.correlation,
        bool(said.flags & _START),
        bool(said.flags & _END),
        form.options.shapes,
    )
