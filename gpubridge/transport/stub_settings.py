"""Settings of a stub, and their form in the INITIALIZE and CONFIGURE messages.

A stub in another environment may be of another version: it ignores fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from gpubridge.transport.messages import Completes, Kind, control_message, decode_control

_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class StateSettings:
    """Configuration of one state of a model's sequences.

    ``initial_dims`` is empty unless the configuration gives an initial value; ``initial_file`` is
    the path of that value, empty for zeros.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: Sequence[int]
    same_buffer: bool = False
    initial_dims: Sequence[int] = ()
    initial_file: str = ""


@dataclass(frozen=True)
class StubModel:
    """The model that a stub runs.

    - ``path``: the Python file with the model's class.
    - ``directory``: the folder that the model may look for its files in.
    - ``batched``: whether its tensors have a batch dimension.
    - ``iterative``: whether its sequences are scheduled again after each execution.
    - ``coroutines``: how many of ``execute`` run at once, if it answers each request once.
    """

    name: str
    version: int
    backend: str
    path: str
    directory: str
    outputs: Sequence[str]
    decoupled: bool = False
    batched: bool = False
    iterative: bool = False
    states: Sequence[StateSettings] = ()
    coroutines: int = 1


@dataclass(frozen=True)
class StubSettings:
    """Settings of one instance's stub.

    - ``arguments``: the arguments of the model's ``initialize``.
    - ``completion``: one of `Completes`.
    - ``input_placement``: where the model receives its inputs: ``source``, ``device`` or ``host``.
    - ``input_sharing``: ``copy`` or ``share`` for inputs in clients' memory; empty: share until it
      fails.
    - ``debug_port``: the port to await a debugger at, 0 for any free one; None for no debugger.
    """

    model: StubModel
    instance: str
    arguments: Mapping[str, str]
    completion: str = Completes.NOWHERE
    busy_poll_us: int = 0
    input_placement: str = "source"
    input_sharing: str = ""
    debug_port: int | None = None


@dataclass(frozen=True)
class StubGpu:
    """The GPU of a stub.

    - ``visible``: the devices that the server may use, as `gpubridge.cuda_ipc.visibility` gives them.
    - ``limit``: the bytes of the stub's arena there.
    - ``server``: the server's process id.
    """

    uuid: str
    visible: list[str | None]
    limit: int
    server: int


@dataclass(frozen=True)
class MemorySettings:
    """Memory that one process of an instance may allocate.

    - ``owner``: the upper half of the ids of its regions.
    - ``output_limit``: the bytes of its output memory.
    - ``gpu``: its GPU, if it has one.
    """

    owner: int
    output_limit: int
    gpu: StubGpu | None = None


def encode_initialize(settings: StubSettings, memory: MemorySettings, output_token: str) -> bytes:
    """Encode the INITIALIZE message; ``output_token``: see `gpubridge.transport.output_pieces`."""
    parts = {"settings": asdict(settings), "memory": asdict(memory)}
    return control_message(Kind.INITIALIZE, output_token=output_token, **parts)


def decode_initialize(message: bytes) -> tuple[StubSettings, MemorySettings, str]:
    """Decode the INITIALIZE message: what `encode_initialize` takes."""
    given = decode_control(message)
    memory = given["memory"]
    gpu = memory["gpu"] and _made(StubGpu, memory["gpu"])
    made = _made(MemorySettings, {**memory, "gpu": gpu})
    return _settings(given["settings"]), made, given["output_token"]


def encode_configure(settings: StubSettings) -> bytes:
    """Encode the CONFIGURE message."""
    return control_message(Kind.CONFIGURE, settings=asdict(settings))


def decode_configure(message: bytes) -> StubSettings:
    """Decode the CONFIGURE message."""
    return _settings(decode_control(message)["settings"])


def _settings(given: dict[str, Any]) -> StubSettings:
    model = given["model"]
    states = [_made(StateSettings, state) for state in model["states"]]
    return _made(StubSettings, {**given, "model": _made(StubModel, {**model, "states": states})})


def _made(kind: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in known})
