"""Settings of a stub, as they cross to its process."""

from gpubridge.transport.messages import Completes, Kind, control_message, decode_control
from gpubridge.transport.stub_settings import (
    MemorySettings,
    StateSettings,
    StubGpu,
    StubModel,
    StubSettings,
    decode_configure,
    decode_initialize,
    encode_configure,
    encode_initialize,
)

STATE = StateSettings("IN", "OUT", "FP32", [2, -1], True, [2, 4], "/m/initial_state/zeros")
MODEL = StubModel(
    "m", 3, "python", "/m/3/model.py", "/m/3", ["A", "B"], True, True, True, [STATE], 5
)
SETTINGS = StubSettings(
    MODEL, "m_0_1", {"model_config": "{}"}, Completes.HERE, 50, "device", "share", 0
)
MEMORY = MemorySettings(7, 1 << 30, StubGpu("GPU-1", ["0,1", None], 1 << 20, 4711))


def test_every_field_arrives():
    for memory in (MEMORY, MemorySettings(1, 2)):
        given = (SETTINGS, memory, "token")
        assert decode_initialize(encode_initialize(*given)) == given
    assert decode_configure(encode_configure(SETTINGS)) == SETTINGS


def test_fields_of_another_version_are_ignored():
    given = decode_control(encode_initialize(SETTINGS, MEMORY, "token"))
    settings, memory = given["settings"], given["memory"]
    for part in (
        given,
        settings,
        settings["model"],
        settings["model"]["states"][0],
        memory,
        memory["gpu"],
    ):
        part["later"] = 1
    decoded = decode_initialize(control_message(Kind.INITIALIZE, **given))
    assert decoded == (SETTINGS, MEMORY, "token")
