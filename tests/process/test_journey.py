"""The journey that docs/explanation/journey.md tells is the one that a request takes through the server's files."""

import json
import re
import sys
from pathlib import Path

from tests.commands import run_command
from tests.process.model_sources import answering
from tests.process.server import write_model
from tests.waits import polling

ROOT = Path(__file__).parents[2]
# A server whose Python calls are noted while it answers: prints, for each request, the files in order.
PROGRAM = """
import http.client, json, os, pathlib, signal, sys, threading
from gpubridge import cli
import gpubridge

folder, models, ports = os.path.dirname(gpubridge.__file__) + "/", sys.argv[1], pathlib.Path(sys.argv[2])
files, noted = [], False

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if noted and event == "call" and name.startswith(folder):
        files.append("gpubridge/" + name[len(folder):])

def ask(size, binary):
    global noted
    # What follows an answer is of the request before: the server is done with it when it answers this one.
    connection.request("GET", "/v2/health/live")
    connection.getresponse().read()
    tensor = {"name": "IN", "datatype": "FP32", "shape": [size]}
    wanted = {"name": "OUT", "parameters": {"binary_data": binary}}
    values = b"" if not binary else bytes(4 * size)
    tensor |= {"parameters": {"binary_data_size": len(values)}} if binary else {"data": [0.0] * size}
    header = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    files.clear()
    noted = True
    connection.request("POST", "/v2/models/m/infer", header + values,
                       {"Inference-Header-Content-Length": str(len(header))})
    answer = connection.getresponse()
    answer.read()
    noted = False
    return answer.status, list(dict.fromkeys(files))

def client():
    global connection
    UNTIL_SERVED
    connection = http.client.HTTPConnection("127.0.0.1", json.loads(ports.read_text())["http"]["port"])
    try:
        asked = [ask(3, False), ask(3, True), ask(3, True), ask(5, True)]
        print("journeys:" + json.dumps(asked), flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=client).start()
sys.setprofile(note)
sys.exit(cli.main(["serve", models, "--http-port=0", "--grpc-port=0", "--metrics-port=0",
                   f"--ports-file={ports}"]))
""".replace("UNTIL_SERVED", polling("ports.exists()"))


SAME = answering("return respond(OUT=value)")


def journeys(tmp_path):
    """The files of Python that each of four requests meets; the second and those after it are alike."""
    done = run_command(
        [sys.executable, "-c", PROGRAM, tmp_path / "models", tmp_path / "ports"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("journeys:")]
    asked = json.loads(line.removeprefix("journeys:"))
    assert [status for status, _ in asked] == [200] * 4, asked
    return [files for _, files in asked]


def test_a_request_passes_the_files_in_the_order_of_the_document(tmp_path):
    write_model(tmp_path / "models", "m", SAME)
    _, new, _, known = journeys(tmp_path)
    page = (ROOT / "docs" / "explanation" / "journey.md").read_text()
    way_in = page.partition("### In the server, on the way in")[2].partition("### In the stub")[0]
    named = list(dict.fromkeys(re.findall(r"`(gpubridge/[\w/]+\.py)`", way_in)))
    met = [path for path in new if path in named]
    assert {"gpubridge/frontend/infer.py", "gpubridge/protocol/infer_request.py"} <= set(met), new
    assert met == [path for path in named if path in met]
    # A request whose form is known meets neither the endpoint, nor the parser, nor the engine in Python.
    assert set(known) & set(named) == set(), known
