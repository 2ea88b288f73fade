"""Parts 1.6 to 1.13 of the API's tables: requests, calls, responses, senders, logs, the user's class."""

from __future__ import annotations

from tests.conformance.api_case import ApiCase


def _cases(part: str, row: str, codes: dict[str, str], model: str = "api") -> list[ApiCase]:
    return [ApiCase(part, row, name, code, model) for name, code in codes.items()]


NONE_NOT_TAKEN = [
    "request_id",
    "correlation_id",
    "inputs",
    "requested_output_names",
    "model_name",
    "model_version",
    "flags",
    "timeout",
    "preferred_memory",
    "trace",
]
REQUESTS = [
    *_cases(
        "1.6",
        "arguments",
        {
            **{f"{name}=None": f"raises(lambda: request({name}=None))" for name in NONE_NOT_TAKEN},
            "parameters=None": "request(parameters=None).parameters()",
            "required": "raises(lambda: pb_utils.InferenceRequest(model_name='m'))",
            "bytes for text": (
                "request(request_id=b'i', model_name=b'api_add', requested_output_names=[b'SUM']).exec()"
            ),
            "correlation id": "raises(lambda: request(correlation_id=1.5))",
            "input None": "raises(lambda: request(inputs=[None], request_id='7'))",
            "output empty": "raises(lambda: request(requested_output_names=[''], request_id='7'))",
            "parameters no dict": "raises(lambda: request(parameters=[1]))",
            "parameters key": "raises(lambda: request(parameters={1: 2}))",
            "parameters value": "raises(lambda: request(parameters={'a': 1.5}))",
        },
    ),
    *_cases(
        "1.6",
        "accessors",
        {
            "defaults": (
                "[request().request_id(), request().correlation_id(), request().flags(), "
                "request().timeout(), request().parameters()]"
            ),
            "inputs": "[t.name() for t in request().inputs()], type(request().inputs()).__name__",
            "names": (
                "sorted(request(requested_output_names=['B', 'A', 'B']).requested_output_names()), "
                "type(request().requested_output_names()).__name__"
            ),
            "string id": "request(correlation_id='five').correlation_id()",
            "set_flags": "r = request()\nr.set_flags(2)\nsaid = r.flags()",
            "set_flags None": "raises(lambda: request().set_flags(None))",
            "parameters": "json.loads(request(parameters={'a': 1, 'b': True, 'c': 'x'}).parameters())",
            "parameters as text": "request(parameters={'a': 1, 'b': 'x'}).parameters()",
            "is_cancelled": "given.is_cancelled()",
            "response sender": "type(given.get_response_sender()).__name__",
        },
    ),
    *_cases(
        "1.6",
        "what the called model sees",
        {
            "nothing given": "seen()",
            "everything": "seen(request_id='me', correlation_id=5, flags=3, timeout=10000000)",
            "string correlation id": "seen(correlation_id='five')",
            "parameters": "seen(parameters={'a': 1, 'b': True, 'c': 'x'})",
        },
    ),
    *_cases(
        "1.6",
        "exec",
        {
            "answer": "request().exec()",
            "outputs asked": "request(requested_output_names=['SUM']).exec()",
            "model raises": (
                "request(inputs=[tensor('A', [-1, 0]), tensor('B')]).exec().error().message()"
                ".split('At:')[0]"
            ),
            "model answers an error": "request(inputs=[tensor('A', [-2, 0]), tensor('B')]).exec()",
            "unknown model": "request(model_name='nope').exec().error().message()",
            "unknown version": "request(model_version=7).exec().error().message()",
            "missing input": "request(inputs=[tensor('A')]).exec().error().message()",
            "wrong type": (
                "request(inputs=[tensor('A'), tensor('B', [1, 2], np.int32)]).exec().error().message()"
            ),
            "unknown output": "request(requested_output_names=['NOPE']).exec().error().message()",
            "decoupled model": "many('pass').exec().error().message()",
            "before execute": "self.early",
            "before execute, async": "self.early_async",
            "without a loop": "raises(lambda: request().async_exec())[0]",
        },
    ),
    *_cases(
        "1.6",
        "async_exec",
        {
            "answer": "r = await call(1).async_exec()\nreturn r.output_tensors()[0].as_numpy().tolist()",
            "many at once": (
                "rs = await asyncio.gather(*[call(i).async_exec() for i in range(20)])\n"
                "return [float(r.output_tensors()[0].as_numpy()[0]) for r in rs]"
            ),
            "error": "return (await call(-2).async_exec()).error().message()",
            "decoupled": (
                "return [len(r.output_tensors()) for r in await call(1).async_exec(decoupled=True)][0]"
            ),
        },
        "api_coroutine",
    ),
]
RESPONSES = [
    *_cases(
        "1.7",
        "InferenceResponse",
        {
            "None": "raises(lambda: pb_utils.InferenceResponse(None))",
            "nothing": "pb_utils.InferenceResponse().output_tensors()",
            "element None": "raises(lambda: pb_utils.InferenceResponse([None]))",
            "keywords": "pb_utils.InferenceResponse(output_tensors=[tensor()], error=None).has_error()",
            "error": "r = pb_utils.InferenceResponse(error=pb_utils.TritonError('x'))\n"
            "said = [r.has_error(), r.error().message(), len(r.output_tensors())]",
            "no error": "pb_utils.InferenceResponse([tensor()]).error()",
            "an error hides tensors": (
                "show(pb_utils.InferenceResponse([tensor()], pb_utils.TritonError('x')))"
            ),
            "parameters": "json.loads(pb_utils.InferenceResponse([], parameters={'a': 1}).parameters())",
            "parameters key": "raises(lambda: pb_utils.InferenceResponse([], parameters={1: 2}))",
            "parameters value": "raises(lambda: pb_utils.InferenceResponse([], parameters={'a': 1.5}))",
            "outputs not asked for": "[t.name() for t in request().exec().output_tensors()]",
        },
    ),
]
SENDERS = [
    *_cases(
        "1.8",
        "send",
        {
            "flag": (
                "[show(r) for r in many('sender.send(refused(lambda: sender.send(answer(1), 2)), FINAL)')"
                ".exec(decoupled=True)][0]"
            ),
            "nothing": (
                "[show(r) for r in many('sender.send(refused(lambda: sender.send()), FINAL)')"
                ".exec(decoupled=True)][0]"
            ),
            "keywords": (
                "[show(r) for r in many('sender.send(response=answer(1), flags=0); "
                "sender.send(flags=FINAL)').exec(decoupled=True)]"
            ),
            "None as flags": (
                "[show(r) for r in many('sender.send(wrong(lambda: sender.send(answer(1), None)), FINAL)')"
                ".exec(decoupled=True)][0]"
            ),
            "error": (
                "[show(r) for r in many('sender.send(pb_utils.InferenceResponse(error="
                'pb_utils.TritonError("x")), FINAL)\').exec(decoupled=True)]'
            ),
            "close": (
                "[show(r) for r in many('sender.send(answer(hasattr(sender, \"close\")), FINAL)')"
                ".exec(decoupled=True)][0]"
            ),
            "is_cancelled": (
                "[show(r) for r in many('sender.send(answer(sender.is_cancelled()), FINAL)')"
                ".exec(decoupled=True)][0]"
            ),
            "constructor": "raises(lambda: c_python_backend_utils.InferenceResponseSender())",
        },
    ),
    *_cases(
        "1.8",
        "of a model that is not decoupled",
        {
            "final before a response": (
                "s = given.get_response_sender()\nsaid = raises(lambda: s.send(flags=FINAL))"
            ),
            "closed": (
                "s = given.get_response_sender()\ns.send(pb_utils.InferenceResponse([tensor('SAID', "
                "[b'sent'], object)]), FINAL)\nself.kept = raises(lambda: s.send(flags=FINAL))\n"
                "answer = pb_utils.InferenceResponse([tensor('SAID', [b'returned'], object)])"
            ),
        },
    ),
    *_cases(
        "1.9",
        "ResponseIterator",
        {
            "class": "type(many('sender.send(flags=FINAL)').exec(decoupled=True)).__name__",
            "no response": (
                "[show(r) for r in many('sender.send(flags=FINAL)').exec(decoupled=True)]"
            ),
            "responses": (
                "[show(r) for r in many('for i in range(3): sender.send(answer(i))\\n"
                "sender.send(flags=FINAL)').exec(decoupled=True)]"
            ),
            "begins again": (
                "it = many('sender.send(answer(1), FINAL)').exec(decoupled=True)\n"
                "said = [[show(r) for r in it] for _ in range(2)]"
            ),
            "resumes": (
                "it = many('sender.send(answer(1)); sender.send(answer(2), FINAL)').exec(decoupled=True)\n"
                "first = show(next(it))\nsaid = first, [show(r) for r in it]"
            ),
            "StopIteration": (
                "it = many('sender.send(flags=FINAL)').exec(decoupled=True)\nlist(it)\n"
                "said = raises(lambda: next(it))"
            ),
            "not decoupled": "[show(r) for r in request().exec(decoupled=True)]",
            "error": (
                "[show(r) for r in request(inputs=[tensor('A', [-2, 0]), tensor('B')])"
                ".exec(decoupled=True)]"
            ),
            "unknown model": (
                "[r.error().message() for r in request(model_name='nope').exec(decoupled=True)]"
            ),
            "cancel": (
                'it = many(\'import time\\nsender.send(answer("begun"))\\nuntil = time.monotonic() + 9\\n'
                "while not sender.is_cancelled() and time.monotonic() < until: time.sleep(0.01)\\n"
                'sender.send(answer("stopped"), FINAL)\').exec(decoupled=True)\n'
                "first = show(next(it))\nit.cancel()\nsaid = first, [show(r) for r in it]"
            ),
        },
    ),
]
LOGS = [
    *_cases(
        "1.10",
        "Logger",
        {
            "calls": (
                "[getattr(pb_utils.Logger, name)('from the API probe') for name in "
                "('log', 'log_info', 'log_warn', 'log_error', 'log_verbose')]"
            ),
            "level": "pb_utils.Logger.log('from the API probe', pb_utils.Logger.VERBOSE)",
            "keywords": "pb_utils.Logger.log(message='from the API probe', level=pb_utils.Logger.INFO)",
            "None": "raises(lambda: pb_utils.Logger.log_info(None))",
            "number": "raises(lambda: pb_utils.Logger.log_info(3))",
            "level number": "raises(lambda: pb_utils.Logger.log('x', 1))",
        },
    ),
]
CONTRACT = [
    *_cases(
        "1.13",
        "initialize",
        {
            "arguments": "sorted(self.args)",
            "all text": "sorted({type(value).__name__ for value in self.args.values()})",
            "values": (
                "[self.args[name] for name in ('model_instance_kind', 'model_instance_device_id', "
                "'model_name', 'model_version')], self.args['model_repository'].split('/')[-1]"
            ),
            "instance name": "self.args['model_instance_name'].startswith('api_0')",
            "configuration": (
                "[json.loads(self.args['model_config'])[name] for name in ('name', 'backend', "
                "'max_batch_size')]"
            ),
        },
    ),
    *_cases(
        "1.13",
        "execute of a decoupled model",
        {
            "returns a list": (
                "[show(r).split('message: ')[1] for r in many('returned = []').exec(decoupled=True)][0]"
            ),
        },
    ),
    *_cases(
        "1.13",
        "inputs may be edited",
        {
            "in place": (
                "a = given.inputs()[0].as_numpy()\na[0] = b'edited'\nsaid = given.inputs()[0].as_numpy()"
            )
        },
    ),
]
CASES = [*REQUESTS, *RESPONSES, *SENDERS, *LOGS, *CONTRACT]
