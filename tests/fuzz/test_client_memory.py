"""Clients' shared memory against the rules as a model says them, over both protocols at a real server."""

import importlib
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.fuzz.budget import fuzzed
from tests.process.flag_sets import BARE
from tests.process.model_sources import answering
from tests.process.server import open_files, running_server, write_model

utils = pytest.importorskip("tritonclient.utils")

_MOST = int(BARE[-1].rpartition("=")[2])
_SIZES = (256, 4100, 1)
_DOORS = st.sampled_from(["http", "grpc"])
_NAMES = st.sampled_from(["a", "b", "c", "d", "e", "ü %2F?", "x" * 300])
_NUMBERS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([0, 4, 64, 255, 256, 257, 4096, 4100, 4101, 1 << 31, 1 << 32, (1 << 63) - 1]),
)
# Keys that name nothing that may be opened.
_WRONG_KEYS = ("", "/", ".", "/..", "/../etc/passwd", "/no-such-object", "a/b", "/\0", "y" * 300)


class _Objects:
    """The objects in /dev/shm, and what should be in each."""

    def __init__(self) -> None:
        self.paths = [Path(f"/dev/shm/gpubridge-fuzz-{uuid.uuid4().hex}") for _ in _SIZES]
        self.expected: list[bytearray] = []

    def fill(self) -> None:
        rng = np.random.default_rng(0)
        self.expected = []
        for path, size in zip(self.paths, _SIZES, strict=True):
            floats = rng.integers(-1000, 1000, size // 4 + 1).astype(np.float32)
            self.expected.append(bytearray(floats.tobytes()[:size]))
            path.write_bytes(self.expected[-1])

    def check(self) -> None:
        for path, expected in zip(self.paths, self.expected, strict=True):
            assert path.read_bytes() == expected


class _Rules(RuleBasedStateMachine):
    """Requests of clients, and their outcomes by the rules."""

    server: object
    objects: _Objects
    clients: dict

    @initialize()
    def begin(self):
        self.objects.fill()
        self.registered: dict[str, tuple[int, str, int, int]] = {}
        self.clients["http"].unregister_system_shared_memory()

    def refused(self, words, call, *arguments):
        """Expect the call to be refused in some words; None: that it is done."""
        if words is None:
            return call(*arguments)
        with pytest.raises(utils.InferenceServerException) as caught:
            call(*arguments)
        assert words in caught.value.message()
        return None

    @rule(endpoint=_DOORS, name=_NAMES, which=st.integers(0, 2), slash=st.booleans(),
          offset=_NUMBERS, nbytes=_NUMBERS)  # fmt: skip
    def register(self, endpoint, name, which, slash, offset, nbytes):
        key = "/" * slash + self.objects.paths[which].name
        words = None
        if name in self.registered:
            words = "already in manager"
        elif len(self.registered) >= _MOST:
            words = f"at most {_MOST} regions"
        elif not 0 < nbytes <= _SIZES[which] - offset:
            words = "Invalid shared memory region"
        call = self.clients[endpoint].register_system_shared_memory
        self.refused(words, call, name, key, nbytes, offset)
        if words is None:
            self.registered[name] = which, key, offset, nbytes

    @rule(endpoint=_DOORS, name=_NAMES, key=st.sampled_from(_WRONG_KEYS))
    def register_nothing(self, endpoint, name, key):
        call = self.clients[endpoint].register_system_shared_memory
        words = "Unable to open shared memory region"
        if name in self.registered:
            words = "already in manager"
        elif len(self.registered) >= _MOST:
            words = f"at most {_MOST} regions"
        self.refused(words, call, name, key, 4, 0)

    @rule(endpoint=_DOORS, name=_NAMES)
    def unregister(self, endpoint, name):
        self.clients[endpoint].unregister_system_shared_memory(name)
        self.registered.pop(name, None)

    @rule(endpoint=_DOORS)
    def unregister_all(self, endpoint):
        self.clients[endpoint].unregister_system_shared_memory()
        self.registered.clear()

    @rule(endpoint=_DOORS, name=st.one_of(st.just(""), _NAMES))
    def status(self, endpoint, name):
        words = None
        if name and name not in self.registered:
            words = "Unable to find system shared memory region"
        call = self.clients[endpoint].get_system_shared_memory_status
        answer = self.refused(words, call, name)
        if words is None:
            if endpoint == "grpc":
                rows = [(r.name, r.key, r.offset, r.byte_size) for r in answer.regions.values()]
            else:
                rows = [(r["name"], r["key"], r["offset"], r["byte_size"]) for r in answer]
            wanted = [name] if name else self.registered
            assert sorted(rows) == sorted((each, *self.registered[each][1:]) for each in wanted)

    def place(self, name, offset, nbytes):
        """Return the object and the offset of these bytes; or the words of the refusal."""
        if name not in self.registered:
            return None, "Unable to find shared memory region"
        which, _, begin, size = self.registered[name]
        if offset >= size:
            return None, "Invalid offset for shared memory region"
        if not 0 < nbytes <= size - offset:
            return None, "Invalid offset + byte size for shared memory region"
        return (which, begin + offset), None

    @rule(endpoint=_DOORS, count=st.integers(1, 70), data=st.data())
    def infer(self, endpoint, count, data):
        names = st.sampled_from([*self.registered, "a"])
        source, target = data.draw(names), data.draw(st.one_of(st.none(), names))
        source_at, target_at = data.draw(_NUMBERS), data.draw(_NUMBERS)
        room = data.draw(st.one_of(st.just(4 * count), _NUMBERS.filter(bool)))
        library = importlib.import_module(f"tritonclient.{endpoint}")
        tensor = library.InferInput("IN", [count], "FP32")
        tensor.set_shared_memory(source, 4 * count, source_at)
        outputs = None
        read, words = self.place(source, source_at, 4 * count)
        wrong = {words} - {None}
        written = None
        if target is not None:
            outputs = [library.InferRequestedOutput("OUT")]
            outputs[0].set_shared_memory(target, room, target_at)
            written, words = self.place(target, target_at, room)
            wrong |= {words} - {None}
            if room < 4 * count and not wrong:
                wrong = {"should be at least"}
        call = self.clients[endpoint].infer
        if wrong:
            with pytest.raises(utils.InferenceServerException) as caught:
                call("m", [tensor], outputs=outputs)
            assert any(words in caught.value.message() for words in wrong)
            return
        which, begin = read
        given = bytes(self.objects.expected[which][begin : begin + 4 * count])
        doubled = (np.frombuffer(given, np.float32) * 2).tobytes()
        answer = call("m", [tensor], outputs=outputs)
        if written is None:
            assert answer.as_numpy("OUT").tobytes() == doubled
        else:
            which, begin = written
            self.objects.expected[which][begin : begin + len(doubled)] = doubled

    def teardown(self):
        self.objects.check()


def _open_objects(pid: int) -> int:
    """Return the number of objects of /dev/shm that a process has open."""
    return sum("gpubridge-fuzz" in link for link in open_files(pid))


def test_the_rules_hold_whatever_clients_ask(tmp_path):
    write_model(tmp_path, "m", answering("return respond(OUT=value * 2)"))
    objects = _Objects()
    http, grpc = (
        importlib.import_module(f"tritonclient.{endpoint}") for endpoint in ("http", "grpc")
    )
    try:
        with (
            running_server(tmp_path, *BARE) as server,
            http.InferenceServerClient(server.http_url) as over_http,
            grpc.InferenceServerClient(server.grpc_url) as over_grpc,
        ):
            stubs = server.stubs()
            machine = type("Rules", (_Rules,), {})
            machine.objects = objects
            machine.clients = {"http": over_http, "grpc": over_grpc}
            run_state_machine_as_test(machine, settings=fuzzed(0.5))
            over_grpc.unregister_system_shared_memory()
            assert server.stubs() == stubs
            assert _open_objects(server.pid) == 0
            assert "Traceback" not in server.log()
    finally:
        for path in objects.paths:
            path.unlink(missing_ok=True)
