"""Models for the simulated GPU whose kernels take as long as a test wants: one missing wait, wrong data."""

from tests.process.device_models import LIBRARY
from tests.process.server import wait_until
from tests.waits import polling

_GATED = (
    LIBRARY
    + """
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def mark(name):
    with open(os.path.join(HERE, name), "a") as file:
        file.write("x")


def is_held():
    return os.path.exists(os.path.join(HERE, "hold"))


def pass_gate():
    # A kernel: it takes as long as the file is there.
    UNTIL_OPEN


class Slot:
    # A tensor of the arena that is written on one stream, which the bridge is told of.
    def __init__(self, library, name, shape):
        self.tensor = pb_utils.Tensor.empty(name, shape, np.float32, "cuda")
        self.capsule = self.tensor.__dlpack__(stream=library.stream)
        self.pointer = self.tensor._device_bytes.pointer


def pinned(values):
    place = int(ok(d.cuMemHostAlloc(values.nbytes, 0)))
    ctypes.memmove(place, values.ctypes.data, values.nbytes)
    return place


class Model:
    def initialize(self, args):
        self.slow, self.fast = Library(args), Library(args)
        self.context = ok(d.cuCtxGetCurrent())

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]
"""
).replace("UNTIL_OPEN", polling("not is_held()"))

# Doubles values of the host, into the arena; while that is held on a stream of its own, but for
# requests that are called quick.
MAKER = (
    _GATED
    + """

class TritonPythonModel(Model):
    def answer(self, request):
        held = is_held() and request.request_id() != "quick"
        return self.made(request.inputs()[0].as_numpy(), "OUT", held)

    def made(self, values, name, held):
        mark("begun")
        library = self.slow if held else self.fast
        slot = Slot(library, name, values.shape)
        if held:
            library.launch(pass_gate)
        source = pinned((2 * values).astype(np.float32))
        ok(d.cuMemcpyHtoDAsync(slot.pointer, source, values.nbytes, library.stream))
        mark("made")
        return slot.tensor
"""
)

# Doubles what is on the GPU, on its own stream, into the arena.
CONSUMER = (
    _GATED
    + """

class TritonPythonModel(Model):
    def answer(self, request):
        given = request.inputs()[0]
        mark("begun")
        library = self.fast
        source = self.taken(given, library)
        slot = Slot(library, "OUT", given.shape())
        library.memory = {}
        library.launch(pass_gate)
        library.double(source, slot.pointer, int(np.prod(given.shape())))
        mark("made")
        return slot.tensor

    def taken(self, given, library):
        given.__dlpack__(stream=library.stream)
        return given._device_bytes.pointer
"""
)


def decoupled(source):
    """Return a model that sends its answer itself."""
    return (
        source
        + """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([self.answer(request)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )


def calling(source, called, decoupled=False):
    """Return a model that has another one answer for it: with what it makes, if it makes something."""
    return (
        source
        + f"""
    def answer(self, request):
        given = request.inputs()[0]
        if hasattr(self, "made"):
            given = self.made(given.as_numpy(), "IN", is_held())
        request = pb_utils.InferenceRequest(
            model_name="{called}", requested_output_names=["OUT"], inputs=[given])
        answer = {"next(iter(request.exec(decoupled=True)))" if decoupled else "request.exec()"}
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        mark("answered")
        return answer.output_tensors()[0]
"""
    )


class Gate:
    """Gate that holds a model's kernels, and the marks that the model leaves."""

    def __init__(self, repository, model, server):
        self._folder = repository / model
        self._server = server

        self.forget()

    def forget(self):
        """Forget what was seen."""
        for path in ("begun", "made", "answered"):
            (self._folder / path).unlink(missing_ok=True)

    def hold(self):
        (self._folder / "hold").touch()

    def open(self):
        (self._folder / "hold").unlink(missing_ok=True)

    def times(self, name):
        path = self._folder / name
        return path.stat().st_size if path.exists() else 0

    def wait_for(self, name, times=1):
        wait_until(
            lambda: self.times(name) >= times, f"{self._folder.name} to be {name}", self._server
        )
