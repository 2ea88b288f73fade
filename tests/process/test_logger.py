"""The logger of models: from everywhere, at every level, with the model's file and line."""

import re

from tests.process.server import running_server, write_model

MODEL = """
import threading
import triton_python_backend_utils as pb_utils

log = pb_utils.Logger
log.log_info("at import")

class TritonPythonModel:
    def initialize(self, args):
        log.log_warn("in initialize")

    def execute(self, requests):
        log.log("in execute", log.ERROR)
        log.log("in execute, too")
        log.log_verbose("hidden")
        threads = [threading.Thread(target=self.talk, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
            for r in requests
        ]

    def talk(self, number):
        log.log_info(f"thread {number}: " + "long " * 40_000)

    def finalize(self):
        log.log_info("in finalize")
"""
BODY = '{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}'


def test_log_lines_name_the_models_file_and_line(tmp_path):
    write_model(tmp_path, "m", MODEL)
    lines = MODEL.splitlines()
    with running_server(tmp_path) as server:
        assert server.request("POST", "/v2/models/m/infer", BODY)[0] == 200
        server.unload_all()
        log = server.log()
    for level, text, shown in [
        ("I", "at import", "at import"),
        ("W", "in initialize", "in initialize"),
        ("E", '"in execute"', "in execute"),
        ("I", '"in execute, too"', "in execute, too"),
        ("I", "in finalize", "in finalize"),
    ]:
        (at,) = [number for number, line in enumerate(lines, 1) if text in line]
        assert re.search(rf"(?m)^{level}\d{{4}} .*model\.py:{at}\] \[m_0\] {shown}$", log), shown
    assert "hidden" not in log
    for number in range(12):
        assert log.count(f"] thread {number}: long") == 1
    assert log.count("long ") == 12 * 40_000
