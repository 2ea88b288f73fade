"""LitServe: arguments are the work and the port."""

import base64
import sys

import litserve
import work


class AddSub(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["INPUT0"], request["INPUT1"]

    def predict(self, inputs):
        return work.add_sub(*inputs)

    def encode_response(self, output):
        return {"OUTPUT0": output[0].tolist(), "OUTPUT1": output[1].tolist()}


class Means(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return base64.b64decode(request["IMAGE"])

    def predict(self, jpeg):
        return work.means(jpeg)

    def encode_response(self, output):
        return {"MEANS": output.tolist()}


class Tokens(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["text_input"]

    def predict(self, prompt):
        yield from work.tokens(prompt)

    def encode_response(self, outputs):
        yield from outputs


if __name__ == "__main__":
    name, port = sys.argv[1:3]
    options = {"stream": True} if name == "tokens" else {}
    api = {"add_sub": AddSub, "means": Means, "tokens": Tokens}[name](
        api_path=f"/{name}", **options
    )
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
