"""Send back each element of IN as a response of its own, DELAY_MS after the one before.

A thread per request answers, so that ``execute`` returns (after WAIT_MS) and takes the next
request while the answers to this one are still on their way.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.under_way = 0
        self.changed = threading.Condition()

    def execute(self, requests):
        for request in requests:
            with self.changed:
                self.under_way += 1
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()
            time.sleep(read(request, "WAIT_MS")[0] / 1000)

    def answer(self, request):
        sender = request.get_response_sender()
        elements, delays = read(request, "IN"), read(request, "DELAY_MS")
        for index, (element, delay) in enumerate(zip(elements, delays)):
            time.sleep(delay / 1000)
            if sender.is_cancelled():
                break
            sender.send(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUT", np.array([element], np.int32)),
                        pb_utils.Tensor("INDEX", np.array([index], np.uint32)),
                    ]
                )
            )
        # Every request ends with this flag, also one that has had no response at all.
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.changed:
            self.under_way -= 1
            self.changed.notify_all()

    def finalize(self):
        with self.changed:
            self.changed.wait_for(lambda: self.under_way == 0)


def read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
