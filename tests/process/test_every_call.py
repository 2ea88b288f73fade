"""Every call that tritonclient can make, over each of its transports."""

import asyncio
import base64
import inspect
import queue
import uuid
from functools import partial

import numpy as np
import pytest
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as system_memory
from tritonclient.utils import InferenceServerException

from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

grpc_client = pytest.importorskip("tritonclient.grpc")
grpc_aio = pytest.importorskip("tritonclient.grpc.aio")

ECHO = answering("return respond(OUT=value)")
NOT_CALLS = {"close", "plugin", "register_plugin", "unregister_plugin"}
VALUES = np.arange(4, dtype=np.float32)
TRANSPORTS = {
    "http": (http_client, "http_url"),
    "http.aio": (http_aio, "http_url"),
    "grpc": (grpc_client, "grpc_url"),
    "grpc.aio": (grpc_aio, "grpc_url"),
}
NO_GPU = object()
REGION = f"/gpubridge-calls-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "echo", ECHO)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    with running_server(repository, *flags) as running:
        yield running


def value_of(answer, name):
    """A member of an answer: a dictionary over HTTP, a message over gRPC."""
    return answer[name] if isinstance(answer, dict) else getattr(answer, name)


def inputs(module):
    tensor = module.InferInput("IN", [4], "FP32").set_data_from_numpy(VALUES)
    return [tensor]


def is_echo(result):
    return result.as_numpy("OUT").tolist() == VALUES.tolist()


def stream(client, module):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("echo", inputs(module))
    result, error = answers.get(timeout=150)
    client.stop_stream()
    return error is None and is_echo(result)


def called_back(client, module):
    answers = queue.Queue()
    client.async_infer("echo", inputs(module), lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=150)
    return error is None and is_echo(result)


async def stream_of_coroutines(client, module):
    async def requests():
        yield {"model_name": "echo", "inputs": inputs(module)}

    async for result, error in client.stream_infer(requests()):
        return error is None and is_echo(result)
    return False


def memory_calls():
    handle = base64.b64encode(bytes(64))
    return {
        "register_system_shared_memory": (("region", REGION, 16), None),
        "get_system_shared_memory_status": (("region",), bool),
        "unregister_system_shared_memory": (("region",), None),
        "register_cuda_shared_memory": (("device", handle, 77, 16), NO_GPU),
        "get_cuda_shared_memory_status": (
            (),
            lambda answer: not (answer if isinstance(answer, list) else answer.regions),
        ),
        "unregister_cuda_shared_memory": ((), None),
    }


def calls_of(client, module):
    """Each method's name, a call of it, and what its answer must be."""
    given = {
        "is_server_live": ((), True),
        "is_server_ready": ((), True),
        "is_model_ready": (("echo",), True),
        "get_server_metadata": ((), lambda answer: value_of(answer, "name") == "triton"),
        "get_model_metadata": (("echo",), lambda answer: value_of(answer, "name") == "echo"),
        "get_model_config": (("echo",), bool),
        "get_model_repository_index": ((), bool),
        "get_inference_statistics": (
            ("echo",),
            lambda answer: len(value_of(answer, "model_stats")) == 1,
        ),
        "load_model": (("echo",), None),
        "unload_model": (("nothing",), None),
        "get_log_settings": ((), bool),
        "update_log_settings": (({"log_verbose_level": 0},), bool),
        "get_trace_settings": ((), bool),
        "update_trace_settings": ((None, {"trace_rate": "1000"}), bool),
        **memory_calls(),
        "infer": (("echo", inputs(module)), is_echo),
    }
    common = {
        name: (partial(getattr(client, name), *arguments), expected)
        for name, (arguments, expected) in given.items()
    }
    if module is http_client or module is http_aio:
        common["generate_request_body"] = (
            lambda: module.InferenceServerClient.generate_request_body(inputs(module)),
            bool,
        )
        common["parse_response_body"] = (None, None)
    if module is http_client:
        common["async_infer"] = (
            lambda: client.async_infer("echo", inputs(module)).get_result(),
            is_echo,
        )
    elif module is grpc_client:
        common["async_infer"] = (lambda: called_back(client, module), True)
        for part in ("start_stream", "async_stream_infer", "stop_stream"):
            common[part] = (lambda: stream(client, module), True)
    elif module is grpc_aio:
        common["stream_infer"] = (lambda: stream_of_coroutines(client, module), True)
    return common


def check(name, made, expected):
    if expected is None:
        return
    assert made is True if expected is True else expected(made), (name, made)


async def make(name, call, expected):
    """Make one call and look at its answer."""
    if expected is NO_GPU:
        with pytest.raises(InferenceServerException, match="got 77"):
            await answer_of(call)
    else:
        check(name, await answer_of(call), expected)


async def answer_of(call):
    made = call()
    return await made if inspect.isawaitable(made) else made


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_call(server, transport):
    module, url = TRANSPORTS[transport]
    region = system_memory.create_shared_memory_region("region", REGION, 16)

    async def all_of_them():
        client = module.InferenceServerClient(getattr(server, url))
        try:
            calls = calls_of(client, module)
            methods = {
                name
                for name, _ in inspect.getmembers(type(client), callable)
                if not name.startswith("_") and name not in NOT_CALLS
            }
            assert methods - calls.keys() == set()
            for name, (call, expected) in calls.items():
                if call is not None:
                    await make(name, call, expected)
        finally:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    try:
        asyncio.run(all_of_them())
    finally:
        system_memory.destroy_shared_memory_region(region)
