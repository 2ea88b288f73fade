"""TLS at a real server: with the clients that users have, and with those that misbehave."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from gpubridge.cli import main
from gpubridge.config.connections import HttpTls
from gpubridge.errors import BridgeError
from gpubridge.frontend.tls_connection import read_context
from tests.commands import run_command
from tests.process.certificates import Authority, tls_flags
from tests.process.forked_commands import run_forked
from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, inference, is_held
from tests.process.server import open_files, running_server, wait_until, write_model
from tests.waits import polling

ECHO = answering("return respond(OUT=value)")
PATIENT = answering(f"""
print("waits", flush=True)
{polling("request.is_cancelled()")}
print("cancelled", flush=True)
return respond()
""")
SIZES = (4, 150_000, 1_000_000)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "echo", ECHO)
    write_model(repository, "patient", PATIENT)
    return repository


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("strange"), "stranger")


@contextlib.contextmanager
def serving(repository, *flags):
    with running_server(repository, *flags, ready=False) as server:
        wait_until(lambda: "ready: " in server.log(), "the models", server)
        yield server


@pytest.fixture(scope="module")
def server(repository, authority):
    with serving(
        repository, *tls_flags(authority.issue("server")), "--log-verbose=1",
        "--http-header-timeout=1", "--grpc-preface-timeout=1", "--http-send-timeout=1",
        "--http-max-connections=8", "--http-max-input-size=100000000",
    ) as server:  # fmt: skip
        before = sockets(server)
        yield server
        wait_until(lambda: sockets(server) <= before, "all connections to be gone", server)
        assert "Traceback" not in server.log()


@pytest.fixture(scope="module")
def mutual(repository, authority):
    flags = tls_flags(authority.issue("mutual"), authority.root)
    with serving(repository, *flags, "--log-verbose=1") as server:
        yield server


def sockets(server) -> int:
    return sum(link.startswith("socket:") for link in open_files(server.pid))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def tensor(module, size):
    data = np.arange(size, dtype=np.float32)
    given = module.InferInput("IN", [size], "FP32").set_data_from_numpy(data)
    return data, [given]


def trust(authority, cert=None, **options) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.root))
    if cert is not None:
        context.load_cert_chain(*cert)
    for name, value in options.items():
        setattr(context, name, value)
    return context


def get(server, context, host="localhost"):
    connection = http.client.HTTPSConnection(
        host, port_of(server.http_url), context=context, timeout=30
    )
    with contextlib.closing(connection):
        connection.request("GET", "/v2")
        return connection.getresponse().status


@contextlib.contextmanager
def connected(server, context):
    with (
        socket.create_connection(("127.0.0.1", port_of(server.http_url)), 30) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        yield tls


def call(server, credentials, timeout=20):
    """Ask over gRPC whether the server is live."""
    with grpc.secure_channel(f"localhost:{port_of(server.grpc_url)}", credentials) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=timeout).live


def credentials(authority, cert=None):
    chain, key = (None, None) if cert is None else (path.read_bytes() for path in cert)
    return grpc.ssl_channel_credentials(authority.root.read_bytes(), key, chain)


@pytest.mark.parametrize("size", SIZES)
def test_tritonclient_http(server, authority, size):
    with http_client.InferenceServerClient(
        f"localhost:{port_of(server.http_url)}",
        ssl=True,
        ssl_options={"ca_certs": str(authority.root)},
    ) as client:
        data, inputs = tensor(http_client, size)
        assert (client.infer("echo", inputs).as_numpy("OUT") == data).all()


@pytest.mark.parametrize("size", SIZES)
def test_tritonclient_grpc(server, authority, size):
    with grpc_client.InferenceServerClient(
        f"localhost:{port_of(server.grpc_url)}", ssl=True, root_certificates=str(authority.root)
    ) as client:
        data, inputs = tensor(grpc_client, size)
        assert (client.infer("echo", inputs).as_numpy("OUT") == data).all()
        answers = []
        client.start_stream(lambda result, error: answers.append(error or result))
        for _ in range(3):
            client.async_stream_infer("echo", inputs)
        client.stop_stream()
        assert [(each.as_numpy("OUT") == data).all() for each in answers] == [True] * 3


@pytest.mark.parametrize("trusted", [True, False])
def test_top_trusts_the_authority_that_it_is_given(server, authority, capsys, trusted):
    flags = ["--cacert", str(authority.root)] if trusted else []
    url = f"https://localhost:{port_of(server.http_url)}"
    assert main(["top", "--once", "--interval", "0.1", "--url", url, *flags]) == (not trusted)
    out, err = capsys.readouterr()
    assert ("MODEL" in out) == trusted
    assert trusted or "certificate verify failed" in err


def test_tritonclient_aio(server, authority):
    async def both() -> None:
        async with http_aio.InferenceServerClient(
            f"localhost:{port_of(server.http_url)}", ssl=True, ssl_context=trust(authority)
        ) as client:
            data, inputs = tensor(http_client, 150_000)
            results = await asyncio.gather(*(client.infer("echo", inputs) for _ in range(6)))
            assert all((each.as_numpy("OUT") == data).all() for each in results)
        async with grpc_aio.InferenceServerClient(
            f"localhost:{port_of(server.grpc_url)}",
            ssl=True,
            root_certificates=str(authority.root),
        ) as client:
            data, inputs = tensor(grpc_client, 150_000)
            results = await asyncio.gather(*(client.infer("echo", inputs) for _ in range(6)))
            assert all((each.as_numpy("OUT") == data).all() for each in results)

    asyncio.run(both())


@pytest.mark.skipif(shutil.which("curl") is None, reason="expected curl")
def test_curl(server, authority):
    url = f"https://localhost:{port_of(server.http_url)}/v2"
    command = ["curl", "-sS", "-w", "%{http_code} %{http_version}", "-o", os.devnull]
    done = run_command([*command, "--cacert", authority.root, url])
    assert (done.returncode, done.stdout) == (0, "200 1.1")
    done = run_command([*command, url])
    assert done.returncode == 60


def test_protocols_that_clients_may_choose(server, authority):
    context = trust(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    for url, chosen in ((server.http_url, "http/1.1"), (server.grpc_url, "h2")):
        address = ("127.0.0.1", port_of(url))
        with (
            socket.create_connection(address, 30) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as tls,
        ):
            assert tls.selected_alpn_protocol() == chosen
            assert tls.version() == "TLSv1.3"


def test_versions(server, authority):
    assert get(server, trust(authority, maximum_version=ssl.TLSVersion.TLSv1_2)) == 200
    old = trust(authority)
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        get(server, old)


def test_the_lines_that_name_addresses(server):
    (line,) = [line for line in server.log().splitlines() if "ready: " in line]
    assert f"gRPC with TLS {server.grpc_url}, https://{server.http_url}, http://" in line
    assert "each model once, with --cacert ROOT:" in server.log()
    assert f"https://{server.http_url}/v2/models/echo/infer" in server.log()


def test_clients_that_do_not_trust_the_server(server, authority, stranger):
    with pytest.raises(ssl.SSLCertVerificationError):
        get(server, trust(stranger))
    with pytest.raises(grpc.RpcError) as caught:
        call(server, credentials(stranger))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert get(server, trust(authority)) == 200
    assert call(server, credentials(authority))


def test_mutual(mutual, authority, stranger):
    client = authority.issue("client", "client@example.org")
    assert get(mutual, trust(authority, client)) == 200
    assert call(mutual, credentials(authority, client))
    refused = {
        "none": None,
        "expired": authority.issue("late", "client@example.org", expired=True),
        "another's": stranger.issue("strange", "client@example.org"),
    }
    for cert in refused.values():
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(mutual, trust(authority, cert))
        with pytest.raises(grpc.RpcError) as caught:
            call(mutual, credentials(authority, cert))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert call(mutual, credentials(authority, client))
    assert "peer did not return a certificate" in mutual.log()
    assert "with --cacert ROOT --cert CLIENT --key KEY:" in mutual.log()


def test_plain_text_to_a_port_of_tls(server):
    status, _, body = server.request("GET", "/v2")
    assert (status, json.loads(body)) == (
        400,
        {"error": "expected TLS, got a request without it: use https://"},
    )
    with (
        grpc_client.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live(client_timeout=20)


def test_tls_to_a_plain_port(repository, authority, server):
    with running_server(repository) as plain:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(plain, trust(authority))
        with pytest.raises(grpc.RpcError):
            call(plain, credentials(authority))
        assert plain.request("GET", "/v2")[0] == 200
    # The same without TLS is the metrics' way, also of a server with TLS.
    assert server.metrics()


def encrypted_key(path: Path, key: Path) -> Path:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    path.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return path


def test_files_that_cannot_be_used_end_the_start(repository, authority, tmp_path):
    cert, key = authority.issue("good")
    other = authority.issue("another")[1]
    fifo, text, broken = tmp_path / "fifo", tmp_path / "text", tmp_path / "broken"
    os.mkfifo(fifo)
    text.write_text("hello")
    broken.write_text("-----BEGIN CERTIFICATE-----\nhello\n-----END CERTIFICATE-----\n")
    locked = encrypted_key(tmp_path / "locked", key)
    absent, name, key_name = tmp_path / "absent", "--http-server-cert", "--http-server-key"
    for (given_cert, given_key), said in {
        (absent, key): f"{name}={absent} cannot be read: No such file or directory",
        (tmp_path, key): f"{name}={tmp_path} cannot be read: Is a directory",
        (fifo, key): f"{name}={fifo} cannot be read: it is not a regular file",
        (text, key): f"{name}={text} holds no certificate: expected PEM",
        (cert, text): f"{key_name}={text} holds no private key: expected PEM",
        (cert, locked): f"{key_name}={locked} is encrypted: expected a key without a password",
        (cert, other): f"{key_name}={other} is not the key of {name}={cert}",
        (broken, key): f"{name}={broken} and {key_name}={key} cannot be used: ",
    }.items():
        settings = HttpTls(use_ssl=True, server_cert=str(given_cert), server_key=str(given_key))
        with pytest.raises(BridgeError) as refused:
            read_context(settings, "http/1.1")
        assert refused.value.message.startswith(said)
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    done = run_forked("serve", str(repository), *ports, *tls_flags((cert, key), text))
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "--grpc-root-cert=" in line


def served_number(server, context) -> int:
    """The serial number of the certificate that a new connection gets."""
    with connected(server, context) as tls:
        return tls.getpeercert()["serialNumber"]


def test_certificates_are_read_again(mutual, authority):
    """The last test of this server."""
    server = mutual
    client = authority.issue("client", "client@example.org")
    context, channel = trust(authority, client), credentials(authority, client)
    _, key = authority.issue("mutual")
    first = served_number(server, context)
    kept = http.client.HTTPSConnection(
        "localhost", port_of(server.http_url), context=context, timeout=30
    )
    kept.request("GET", "/v2")
    kept.getresponse().read()

    key.write_bytes(b"no key")
    server.process.send_signal(signal.SIGHUP)
    for option in ("--http-server-key", "--grpc-server-key"):
        said = f"stay as they are: {option}={key} holds no private key"
        wait_until(lambda said=said: said in server.log(), "the error", server)
    assert served_number(server, context) == first

    # Replaces both files.
    authority.issue("mutual")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: served_number(server, context) != first, "the new one", server)
    assert call(server, channel)
    kept.request("GET", "/v2")
    assert kept.getresponse().status == 200
    kept.close()

    def refusal():
        try:
            get(server, context)
        except ssl.SSLCertVerificationError as error:
            return str(error)
        return ""

    def refused_by_grpc():
        try:
            return not call(server, channel)
        except grpc.RpcError:
            return True

    for said, hosts, expired in (
        ("certificate has expired", (), True),
        ("Hostname mismatch", ("example.org",), False),
    ):
        authority.issue("mutual", *hosts, expired=expired)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda said=said: said in refusal(), said, server)
        # The certificate of the other port is read after that of the first.
        wait_until(refused_by_grpc, "the refusal by gRPC", server)
    assert server.stop() == 0


def test_a_handshake_that_stalls(server, authority):
    hello = ssl.MemoryBIO()
    client = trust(authority).wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    whole = hello.read()
    for url in (server.http_url, server.grpc_url):
        for sent in (b"", whole[:20], whole):
            with socket.create_connection(("127.0.0.1", port_of(url)), 30) as sock:
                sock.sendall(sent)
                # Until the server has had enough.
                while sock.recv(1 << 16):
                    pass
    assert get(server, trust(authority)) == 200


def test_bytes_that_are_no_tls(server, authority):
    for url in (server.http_url, server.grpc_url):
        for garbage in (
            b"\0" * 100_000,
            os.urandom(100_000),
            b"\x16\x03\x01\xff\xff" + b"x" * 70_000,
        ):
            with (
                socket.create_connection(("127.0.0.1", port_of(url)), 30) as sock,
                contextlib.suppress(ConnectionError),
            ):
                sock.sendall(garbage)
                while sock.recv(1 << 16):
                    pass
    assert get(server, trust(authority)) == 200


def test_damaged_records_end_their_connection_only(server, authority):
    with connected(server, trust(authority)) as other, connected(server, trust(authority)) as tls:
        raw = socket.socket(fileno=os.dup(tls.fileno()))
        with contextlib.closing(raw):
            raw.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                while tls.recv(1 << 16):
                    pass
        other.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.1 200"


def test_handshakes_count_as_connections(server, authority):
    address = ("127.0.0.1", port_of(server.http_url))
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address, 30)) for _ in range(8 + 64 + 10)
        ]
        # The oldest make place for the newer ones, and for those who are quick.
        assert idle[0].recv(1) == b""
        assert get(server, trust(authority)) == 200


def test_connections_over_the_limit_are_told_so(server, authority):
    field, body = binary_request([("IN", "FP32", (4,), bytes(16))])
    head = inference("echo", body, field)[:-8]
    with contextlib.ExitStack() as stack:

        def is_told():
            # A second later its head would be late.
            stack.enter_context(connected(server, trust(authority))).sendall(head)
            return get(server, trust(authority)) == 503

        wait_until(is_told, "them to count", server)


def test_a_client_that_does_not_read(server, authority):
    field, body = binary_request([("IN", "FP32", (2_500_000,), bytes(10_000_000))])
    with connected(server, trust(authority)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(inference("echo", body, field))
        with connected(server, trust(authority)) as other:
            other.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
            assert other.recv(12) == b"HTTP/1.1 200"
        # Its time is over some time: then the rest of the answer is not there.
        wait_until(lambda: not is_held(slow), "the end of the connection", server)
        received = 0
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            while part := slow.recv(1 << 20):
                received += len(part)
        assert received < len(body)


def test_a_client_that_closes_cancels_its_request(server, authority):
    field, body = binary_request([("IN", "FP32", (1,), bytes(4))])
    with connected(server, trust(authority)) as tls:
        tls.sendall(inference("patient", body, field))
        wait_until(lambda: "patient_0] waits" in server.log(), "the request", server)
    wait_until(lambda: "patient_0] cancelled" in server.log(), "its end", server)


def test_a_body_beyond_the_limit_is_told(server, authority):
    with connected(server, trust(authority)) as tls:
        tls.sendall(inference("echo", b"x" * 10, length=200_000_000))
        answer = b""
        while part := tls.recv(1 << 16):
            answer += part
        assert answer.startswith(b"HTTP/1.1 413")
        # The end was said as TLS says it.
        assert tls.recv(1) == b""
