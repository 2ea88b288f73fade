"""Ray Serve with one replica: arguments are the work and the port."""

import sys
import threading

import work
from ray import serve
from starlette.responses import JSONResponse, StreamingResponse


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class AddSub:
    async def __call__(self, request):
        given = await request.json()
        total, difference = work.add_sub(given["INPUT0"], given["INPUT1"])
        return JSONResponse({"OUTPUT0": total.tolist(), "OUTPUT1": difference.tolist()})


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Means:
    async def __call__(self, request):
        return JSONResponse({"MEANS": work.means(await request.body()).tolist()})


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Tokens:
    async def __call__(self, request):
        given = await request.json()
        return StreamingResponse(work.tokens(given["text_input"]), media_type="text/plain")


if __name__ == "__main__":
    name, port = sys.argv[1:3]
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    application = {"add_sub": AddSub, "means": Means, "tokens": Tokens}[name]
    serve.run(application.bind(), route_prefix=f"/{name}")
    threading.Event().wait()
