"""Web pages of other origins, and hosts that are none of the server's: what is refused, and what goes on."""

import pytest

from gpubridge.config.origins import host_names, read_origins
from gpubridge.dataplane import HttpOrigins
from gpubridge.errors import BridgeError
from gpubridge.frontend.http.origins import origins_at
from tests.unit.http_endpoint import Endpoint, parse_answers

LISTED = "https://app.example:8443"


def asked(*fields, method=b"POST", target=b"/echo", local=True, listed=(LISTED,)):
    """Return status, header and body of the answer to a request with these fields."""
    origins = HttpOrigins(listed, ["gpu-box", *host_names(listed)] if local else None)
    endpoint = Endpoint(origins=origins)
    lines = [method + b" " + target + b" HTTP/1.1", *(field.encode() for field in fields)]
    endpoint.receive(b"\r\n".join([*lines, b"Content-Length: 3", b"", b"abc"]))
    ((status, header, body),) = parse_answers(bytes(endpoint.transport.sent))
    assert (status == 200) == any("completed" in each.ends for each in endpoint.handlers) or (
        method == b"OPTIONS"
    )
    return status, header, body


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1:8000", "10.1.2.3",
     "[::1]:8000", "[fe80::1]", "gpu-box:8000", "App.Example", "ip6-localhost", ""],
)  # fmt: skip
def test_hosts_of_a_server_for_this_machine(host):
    for method in (b"GET", b"POST"):
        assert asked(f"Host: {host}", method=method)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil-localhost", "[::1].evil.example", "0x7f.1", "[evil]", "app.example.evil.example"],
)  # fmt: skip
def test_names_that_lead_here_from_outside(host):
    for method in (b"GET", b"POST", b"OPTIONS"):
        status, header, body = asked(f"Host: {host}", method=method)
        assert status == 403
        assert b"expected localhost or an address as the host, got '" + host.encode() in body
        assert b"Access-Control-Allow-Origin" not in header
        # Other machines know a server by names that it does not know.
        assert asked(f"Host: {host}", method=method, local=False)[0] == 200
    assert asked("Host: localhost", f"Host: {host}")[0] == 403
    assert asked(f"Host: {host}", "Host: localhost")[0] == 403
    assert asked(f"Host: {host}", listed=["*"])[0] == 200


PROGRAMS = {
    "tritonclient": ("User-Agent: python/gevent-http-client-2.6.1",),
    "tritonclient.aio": ("Accept: */*", "Accept-Encoding: gzip, deflate", "User-Agent: aiohttp/3.14"),
    "curl": ("User-Agent: curl/8", "Accept: */*", "Content-Type: application/x-www-form-urlencoded"),
    "KServe": (
        "Accept: */*", "Accept-Encoding: gzip, deflate", "Connection: keep-alive",
        "User-Agent: python-httpx/0.27.2", "Content-Type: application/json",
    ),
    "Prometheus": (
        "User-Agent: Prometheus/3.5.0", "Accept-Encoding: gzip",
        "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
        "X-Prometheus-Scrape-Timeout-Seconds: 10",
    ),
    "kubelet": ("User-Agent: kube-probe/1.31", "Accept: */*", "Connection: close"),
    "a gateway": (
        "X-Forwarded-For: 203.0.113.9", "X-Forwarded-Host: models.example", "X-Forwarded-Proto: https",
        "X-Request-Id: 1", "Forwarded: for=203.0.113.9;host=models.example",
    ),
    "Node.js": ("Accept: */*", "Accept-Language: *", "Sec-Fetch-Mode: cors", "User-Agent: node"),
}  # fmt: skip


@pytest.mark.parametrize("fields", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_programs_notice_nothing(fields, method):
    here = "localhost:8000", "127.0.0.1:8000", "[::1]:8000"
    elsewhere = "10.42.0.7:8000", "[fd00::7]:8000", "m.ns.svc.cluster.local", "models.example"
    for host in (*here, *elsewhere):
        for local in {host in here, False}:
            status, header, _ = asked(f"Host: {host}", *fields, method=method, local=local)
            assert status == 200
            assert not any(name.startswith((b"Access-", b"Vary")) for name in header)
    # Health checks of balancers name no host.
    assert asked(*fields, method=method)[0] == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ((), 200),
        (("User-Agent: curl/8", "Content-Type: text/plain"), 200),
        (("Origin: http://localhost:8000",), 200),
        (("Origin: http://LOCALHOST:8000",), 200),
        (("Origin: https://proxy.example", "Sec-Fetch-Site: same-origin"), 200),
        (("Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"), 200),
        ((f"Origin: {LISTED}", "Sec-Fetch-Site: cross-site"), 200),
        (("Origin: http://evil.example",), 403),
        (("oRIGIN: null",), 403),
        (("Origin: ",), 403),
        (("Origin: http://localhost:3000", "Sec-Fetch-Site: same-site"), 403),
        (("Origin: http://localhost",), 403),
        (("Origin: https://app.example",), 403),
        ((f"Origin: {LISTED}.evil.example",), 403),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-site",), 403),
        (("Sec-Fetch-Site: ",), 403),
        (("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"), 403),
        (("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"), 403),
    ],
)  # fmt: skip
@pytest.mark.parametrize("local", [True, False])
def test_pages(fields, status, local):
    answer = asked("Host: localhost:8000", *fields, local=local)
    assert answer[0] == status
    assert asked("Host: localhost:8000", *fields, local=local, listed=["*"])[0] == 200
    if status == 403:
        assert b"--http-allowed-origins=" in answer[2]


def test_a_link_to_the_server_may_be_followed():
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    for dest, status in (("document", 200), ("iframe", 403), ("image", 403)):
        assert asked(*link, f"Sec-Fetch-Dest: {dest}", method=b"GET")[0] == status


@pytest.mark.parametrize("target", [b"/echo", b"/missing"])
def test_pages_of_listed_origins_may_read_answers(target):
    _, header, _ = asked(f"Origin: {LISTED}", target=target)
    assert header[b"Access-Control-Allow-Origin"].decode() == LISTED
    assert header[b"Vary"] == b"Origin"
    assert b"Access-Control-Allow-Origin" not in asked(target=target)[1]


def test_browsers_may_ask_before_they_send():
    wanted = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: a,b")
    status, header, body = asked(f"Origin: {LISTED}", *wanted, method=b"OPTIONS")
    assert (status, body) == (200, b"")
    assert header[b"Access-Control-Allow-Methods"] == b"GET, POST"
    assert header[b"Access-Control-Allow-Headers"] == b"a,b"
    assert header[b"Access-Control-Allow-Origin"].decode() == LISTED
    assert asked("Origin: http://evil.example", *wanted, method=b"OPTIONS")[0] == 403


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", 403),
        ("localhost", 403),
        ("::1", 403),
        ("0.0.0.0", 200),
        ("::", 200),
        ("", 200),
    ],
)
async def test_only_servers_for_this_machine_look_at_hosts(address, status):
    endpoint = Endpoint(origins=await origins_at(address, ()))
    for host, expected in ((b"10.42.0.7:8000", 200), (b"m.ns.svc", status)):
        endpoint.receive(b"GET /echo HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert endpoint.answers()[-1][0] == expected


def test_origins_are_read_as_browsers_send_them():
    texts = ["HTTPS://App.example:443/, http://a:80", "http://[::1]:8080,*", "app+x://id"]
    found = read_origins(texts)
    assert found == ("https://app.example", "http://a", "http://[::1]:8080", "*", "app+x://id")
    assert host_names(found) == ["app.example", "a", "[::1]", "id"]


@pytest.mark.parametrize(
    "text", ["app.example", "https://", "https://a/path", "https://*.a", "null", "https://a:x"]
)
def test_what_is_no_origin(text):
    with pytest.raises(BridgeError, match=r"^--http-allowed-origins expects SCHEME://HOST"):
        read_origins([f"http://a,{text}"])
