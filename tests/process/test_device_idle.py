"""Threads of a model that use the GPU after its execute has returned, while no message comes."""

from tests.process.device_models import LIBRARY, running_device_server, write_device_model
from tests.process.server import wait_until
from tests.process.test_device_network import pids_of
from tests.waits import polling

# A thread makes the first tensor on the GPU, has a stream of the model's write there, and drops it;
# then it says that the memory has gone back.
LATE = (
    LIBRARY
    + """
import threading
from gpubridge.pb_utils import host
from gpubridge.stub.memory.outputs import OutputMemory

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.source = np.ones(64, np.float32)
        # The server asks for idle memory every few seconds, which wakes the stub, too.
        OutputMemory.trim = lambda *_: self.mark("trimmed")

    def execute(self, requests):
        threading.Thread(target=self.work, daemon=True).start()
        outputs = [pb_utils.Tensor("OUT", each.inputs()[0].as_numpy()) for each in requests]
        return [pb_utils.InferenceResponse([output]) for output in outputs]

    def work(self):
        # The main thread waits for a message by then.
        self.wait_for("go")
        self.use(False)
        device = host.current().device
        UNTIL_IDLE
        self.mark("returned")
        self.wait_for("fail")
        self.use(True)

    def use(self, faulty):
        library = Library(self.args)
        tensor = pb_utils.Tensor.empty("T", [64], np.float32, "cuda")
        tensor.__dlpack__(stream=library.stream)
        pointer = 64 if faulty else tensor._device_bytes.pointer
        ok(d.cuMemcpyHtoDAsync(pointer, self.source, 256, library.stream))

    def mark(self, name):
        with open(os.path.join(HERE, name), "w"):
            pass

    def wait_for(self, name):
        UNTIL_THERE
"""
)
LATE = LATE.replace("UNTIL_IDLE", polling("not device.busy")).replace(
    "UNTIL_THERE", polling("os.path.exists(os.path.join(HERE, name))")
)


def was_woken_by_its_thread(served, folder):
    """Return whether a stub looks after its thread's work, and ends for it, before a message comes."""
    for file in [folder / name for name in ("go", "returned", "fail", "trimmed")]:
        file.unlink(missing_ok=True)
    pids = pids_of(served, "late")
    served.server.request("POST", "/v2/models/late/generate", '{"IN": [1.0]}')
    (folder / "go").touch()
    wait_until((folder / "returned").exists, "the memory to go back", served.server)
    assert pids_of(served, "late") == pids
    (folder / "fail").touch()
    wait_until(lambda: pids_of(served, "late") not in ([], pids), "a new stub", served.server)
    wait_until(lambda: served.server.is_ready("late"), "it to be ready", served.server)
    return not (folder / "trimmed").exists()


def test_a_stub_looks_after_what_its_threads_do_while_it_gets_no_message(tmp_path):
    write_device_model(tmp_path, "late", LATE)
    with running_device_server(tmp_path, tolerated="at an address that is not allocated") as served:
        assert any(was_woken_by_its_thread(served, tmp_path / "late") for _ in range(3))
