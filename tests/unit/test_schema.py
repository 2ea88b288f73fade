"""The protobuf schema is the public protocol's, and lives beside tritonclient's own."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import gpubridge.schema
from gpubridge.schema import enum_name, message_class

FOLDER = Path(gpubridge.schema.__file__).parent


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fields(message):
    """Return what is on the wire of a message and of those nested in it."""
    oneofs = [one.name for one in message.oneof_decl]
    described: dict[str, object] = {
        field.name: (
            field.number,
            field.type,
            field.type_name,
            field.label,
            oneofs[field.oneof_index] if field.HasField("oneof_index") else None,
        )
        for field in message.field
    }
    described.update((nested.name, fields(nested)) for nested in message.nested_type)
    described.update((enum.name, values(enum)) for enum in message.enum_type)
    return described


def values(enum):
    return {value.name: value.number for value in enum.value}


def described(file):
    methods = {
        method.name: (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for service in file.service
        for method in service.method
    }
    return {
        "package": file.package,
        "messages": {message.name: fields(message) for message in file.message_type},
        "enums": {enum.name: values(enum) for enum in file.enum_type},
        "services": [service.name for service in file.service],
        "methods": methods,
    }


def read_set(path):
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


@pytest.mark.parametrize("name", ["model_config", "grpc_service"])
def test_each_field_is_that_of_the_public_protocol(name):
    pytest.importorskip("tritonclient.grpc")
    from tritonclient.grpc import model_config_pb2, service_pb2

    theirs = descriptor_pb2.FileDescriptorProto()
    {"model_config": model_config_pb2, "grpc_service": service_pb2}[name].DESCRIPTOR.CopyToProto(
        theirs
    )
    ours = read_set(FOLDER / "v2.binpb").file
    (file,) = [file for file in ours if file.name == f"{name}.proto"]
    assert described(file) == described(theirs)


def test_the_descriptors_are_compiled_from_the_sources(tmp_path):
    pytest.importorskip("grpc_tools")
    compiled = tmp_path / "v2.binpb"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", FOLDER, "--include_imports"),
            *(f"--descriptor_set_out={compiled}", "grpc_service.proto"),
        ],
        check=True,
    )
    assert read_set(compiled) == read_set(FOLDER / "v2.binpb")


def test_neither_grpc_nor_tritonclient_is_imported():
    loaded = run_python(
        "import sys; from gpubridge.schema import message_class; "
        "message_class('ModelConfig')(name='m'); print('\\n'.join(sys.modules))"
    ).split()
    assert "google.protobuf.message" in loaded
    assert [name for name in loaded if name.split(".")[0] in ("grpc", "tritonclient")] == []


def test_nothing_is_loaded_by_import():
    run_python(
        "from gpubridge.schema import message_class; import gpubridge.config; "
        "assert message_class.cache_info().currsize == 0"
    )


@pytest.mark.parametrize("ours_first", [True, False])
def test_the_messages_of_tritonclient_live_beside_ours(ours_first):
    pytest.importorskip("tritonclient.grpc")
    imports = [
        "from gpubridge.schema import message_class; ours = message_class('ModelInferRequest')",
        "from tritonclient.grpc import service_pb2",
    ]
    run_python(
        "\n".join(imports if ours_first else reversed(imports))
        + "\ntheirs = service_pb2.ModelInferRequest"
        "\nassert ours is not theirs"
        "\nassert ours.FromString(theirs(id='a').SerializeToString()).id == 'a'"
    )


def test_names_of_enums():
    assert enum_name("DataType", 11) == "TYPE_FP32"
    assert enum_name("ModelInstanceGroup.Kind", message_class("ModelInstanceGroup").KIND_GPU) == (
        "KIND_GPU"
    )
    assert enum_name("DataType", 99) == ""


ASK_AT_ONCE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from gpubridge.schema import message_class

sys.setswitchinterval(1e-6)
everyone = threading.Barrier(8)

def ask(_):
    everyone.wait(20)
    return message_class("ModelConfig")

with ThreadPoolExecutor(8) as threads:
    print(len(set(map(id, threads.map(ask, range(8))))))
"""


def test_threads_that_ask_at_once_get_one_class():
    assert run_python(ASK_AT_ONCE) == "1\n"
