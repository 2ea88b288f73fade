"""Models that say what they are, and what loads, unloads and asks them."""

import json
import shutil
import threading
from contextlib import contextmanager

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.process.server import wait_until, write_model

EXPLICIT = ("--model-control-mode", "explicit")

STRINGS = "IN STRING [1] > OUT STRING [1]"
CONFIG = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
        "version_policy": {"all": {}},
    }
)
SOURCE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.said = "{tag}/" + args["model_version"] + "/" + args["model_repository"]
        {initialize}

    def execute(self, requests):
        {execute}
        said = np.array([self.said.encode()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)]) for _ in requests]

    def finalize(self):
        {finalize}
"""


def source(tag, initialize="pass", execute="pass", finalize="pass"):
    return SOURCE.format(tag=tag, initialize=initialize, execute=execute, finalize=finalize)


def write(repository, name="m", tag="a", *, config="", version=1, **parts):
    """Write a model that answers ``tag/version/directory``."""
    return write_model(
        repository, name, source(tag, **parts), config=config, version=version, tensors=STRINGS
    )


def only(*models):
    """Return flags for a server of some models of a repository, and of those that they are made of."""
    return *EXPLICIT, *(f"--load-model={name}" for name in models)


def control(server, action, name="m", **parameters):
    """Load or unload; returns the status and the error."""
    body = json.dumps({"parameters": parameters}) if parameters else None
    path = f"/v2/repository/models/{name}/{action}"
    status, _, answer = server.request("POST", path, body)
    return status, json.loads(answer)["error"] if answer else ""


def refusal(server, name):
    """Return why a model of the server's repository is not loaded; the model is deleted."""
    status, error = control(server, "load", name)
    assert status != 200
    control(server, "unload", name)
    shutil.rmtree(server.repositories[0] / name)
    return error


def ask(server, name="m", version=""):
    """Return what a model says (``tag/version``), or the status and the error."""
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    path = f"/v2/models/{name}{version and f'/versions/{version}'}/infer"
    status, _, body = server.request("POST", path, json.dumps({"inputs": [tensor]}))
    answer = json.loads(body)
    if status != 200:
        return status, answer["error"]
    return "/".join(answer["outputs"][0]["data"][0].split("/")[:2])


def states(server, name="m"):
    rows = server.index()
    return {version: row.get("state") for (n, version), row in rows.items() if n == name}


@contextmanager
def asked_by_many(server, connections=16):
    """Ask ``m`` over many connections, half of them gRPC; yields the list of all answers."""
    answers: list[str] = []
    over = threading.Event()

    def ask_on(kit, url):
        data = kit.InferInput("IN", [1], "BYTES").set_data_from_numpy(np.array([b"x"], np.object_))
        with kit.InferenceServerClient(url) as client:
            while not over.is_set():
                try:
                    said = client.infer("m", [data]).as_numpy("OUT")[0].decode()
                    answers.append(said.split("/")[0])
                except InferenceServerException as error:
                    answers.append(f"failed: {error}")

    kits = (tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url)
    threads = [threading.Thread(target=ask_on, args=kits[i % 2]) for i in range(connections)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answers) > connections, "first answers", server)
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def wait_for_answer(server, answers, tag):
    begin = len(answers)
    wait_until(lambda: tag in answers[begin:], f"answers of {tag}", server)
