"""How each server is installed and started with the model of one work."""

from __future__ import annotations

import importlib.metadata
import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server_process import Contender, Launch, Ports
from benchmarks.varied_models import Model, write_repository

__all__ = ["PEERS", "Install", "PeerServer", "Place", "contender", "versions_of"]

_APPS = Path(__file__).resolve().parent.parent / "models" / "peers"
_CLASSES = {"add_sub": "AddSub", "means": "Means", "tokens": "Tokens"}
_TENSORS = {
    "add_sub": (
        [("INPUT0", "FP32", 8), ("INPUT1", "FP32", 8)],
        [("OUTPUT0", "FP32", 8), ("OUTPUT1", "FP32", 8)],
    ),
    "means": ([("IMAGE", "STRING", 1)], [("MEANS", "FP32", 3)]),
    "tokens": ([("text_input", "STRING", 1)], [("text_output", "STRING", 1)]),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is started: its work, its ports, the interpreter of its environment, a folder of its own."""

    work: str
    ports: Ports
    python: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Install:
    """Packages of an environment, all but the first for the models; the first is the server."""

    server: str
    others: tuple[str, ...] = ()

    def packages(self) -> list[str]:
        """Return everything to install, with the Pillow that is here, if one is."""
        try:
            pillow = f"pillow=={importlib.metadata.version('pillow')}"
        except importlib.metadata.PackageNotFoundError:
            pillow = "pillow"
        return [self.server, *self.others, pillow]


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server: the form of its requests, what to install, and the command that serves a work.

    ``install`` is None for those that are here already.
    """

    name: str
    dialect: str
    install: Install | None
    launch: Callable[[Place], Launch]


def contender(side: Contender) -> PeerServer:
    """Return gpubridge or Triton, with the work as a model of Triton's Python backend."""

    def launch(place: Place) -> Launch:
        models = place.folder / "models"
        return side.launch(write_repository([_triton_model(place.work)], models), place.ports)

    return PeerServer(side.name, "v2", None, launch)


def versions_of(server: PeerServer) -> str:
    """Return what is installed for a server, as told to pip."""
    return (
        "" if server.install is None else " ".join([server.install.server, *server.install.others])
    )


def _triton_model(work: str) -> Model:
    lists = []
    for kind, tensors in zip(("input", "output"), _TENSORS[work], strict=True):
        described = [
            f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dim} ] }}'
            for name, datatype, dim in tensors
        ]
        lists.append(f"{kind} [ {', '.join(described)} ]")
    config = [f'name: "{work}"', 'backend: "python"', *lists]
    config.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    if work == "tokens":
        config.append("model_transaction_policy { decoupled: true }")
    code = [(_APPS / name).read_text() for name in ("work.py", "triton_models.py")]
    code.append(f"TritonPythonModel = {_CLASSES[work]}\n")
    return Model(work, "\n".join(config) + "\n", "\n\n".join(code))


def _environment(place: Place, **settings: str) -> dict[str, str]:
    """Return an environment built from nothing, whose home is the server's folder."""
    return {
        "HOME": str(place.folder),
        "LANG": "C.UTF-8",
        "PATH": f"{place.python.parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(_APPS),
        "VIRTUAL_ENV": str(place.python.parent.parent),
        **settings,
    }


def _app(name: str, *ports: str) -> Callable[[Place], Launch]:
    """Return the launch of a program of ours that imports the server as a library."""

    def launch(place: Place) -> Launch:
        given = [str(getattr(place.ports, port)) for port in ports]
        command = [str(place.python), str(_APPS / f"{name}_app.py"), place.work, *given]
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(place.folder)}
        # Triton's stub loads the library of the interpreter whose modules it finds.
        settings["LD_LIBRARY_PATH"] = str(sysconfig.get_config_var("LIBDIR"))
        return Launch(command, _environment(place, **settings), place.folder)

    return launch


def _bentoml(place: Place) -> Launch:
    program = place.python.with_name("bentoml")
    command = [str(program), "serve", f"bentoml_app:{_CLASSES[place.work]}"]
    command += ["--host", "127.0.0.1", "--port", str(place.ports.http)]
    settings = {"BENTOML_HOME": str(place.folder), "BENTOML_DO_NOT_TRACK": "True"}
    return Launch(command, _environment(place, **settings), _APPS)


def _mlserver(place: Place) -> Launch:
    settings = {
        "host": "127.0.0.1",
        "http_port": place.ports.http,
        "grpc_port": place.ports.grpc,
        "metrics_port": place.ports.metrics,
        "debug": False,
    }
    if place.work == "tokens":
        # MLServer streams only without a process for the model, and without compression.
        settings |= {"parallel_workers": 0, "gzip_enabled": False}
    model = {"name": place.work, "implementation": f"mlserver_app.{_CLASSES[place.work]}"}
    (place.folder / "settings.json").write_text(json.dumps(settings))
    (place.folder / "model-settings.json").write_text(json.dumps(model))
    command = [str(place.python.with_name("mlserver")), "start", str(place.folder)]
    return Launch(command, _environment(place), place.folder)


PEERS: tuple[PeerServer, ...] = (
    PeerServer(
        "PyTriton",
        "v2",
        Install("nvidia-pytriton==0.7.0", ("numpy==1.26.4",)),
        _app("pytriton", "http", "grpc", "metrics"),
    ),
    PeerServer(
        "MLServer",
        "mlserver",
        Install("mlserver==1.7.1", ("uvloop==0.21.0", "numpy==2.4.6")),
        _mlserver,
    ),
    PeerServer(
        "LitServe",
        "base64",
        Install("litserve==0.2.19", ("numpy==2.4.6",)),
        _app("litserve", "http"),
    ),
    PeerServer("BentoML", "form", Install("bentoml==1.4.40", ("numpy==2.4.6",)), _bentoml),
    PeerServer(
        "Ray Serve", "body", Install("ray[serve]==2.60.0", ("numpy==2.4.6",)), _app("ray", "http")
    ),
)
