"""The cases of the API probe: rows of the API's tables (parts 1.0 to 1.13), and code for a model to run."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ApiCase:
    """Code that a model runs and what it is asked by.

    Parameters
    ----------
    part, row
        The part of the API's tables, and the row of it.
    name
        Unique within the part and row.
    code
        Runs in a model of ``api_repository``; its value, or the variable ``said``, is answered.
    model
        Which of the models runs it.
    """

    part: str
    row: str
    name: str
    code: str
    model: str = "api"

    @property
    def key(self) -> str:
        """The name of the case in the recorded answers."""
        return f"{self.part} {self.row}: {self.name}"


def _cases(text: str) -> Iterator[ApiCase]:
    """Read rows, as ``PART ROW``, or ``PART ROW @MODEL``, and below each its cases, as ``NAME: CODE``.

    Code of several lines is indented below the name. A line that ends in a backslash goes on in the next one.
    """
    part = row = model = ""
    for line in text.replace("\\\n    ", "").replace("\n    ", "\0").splitlines():
        if line.startswith(" "):
            name, _, code = line.partition(":")
            yield ApiCase(part, row, name.strip(), code.strip(" \0").replace("\0", "\n"), model)
        else:
            part, _, rest = line.partition(" ")
            row, _, model = rest.partition(" @")
            model = model or "api"


_TEXT = r"""\
1.0 names
  pb_utils:
    missing('TritonError TritonModelException Tensor InferenceRequest InferenceResponse Logger \
    PreferredMemory TRITONSERVER_MEMORY_GPU TRITONSERVER_MEMORY_CPU MetricFamily load_model \
    unload_model is_model_ready get_model_dir', pb_utils)
  embedded module:
    missing('InferenceTrace Metric MetricKind MemoryType InferenceResponseSender ResponseIterator \
    SharedMemory shared_memory', c_python_backend_utils)
  log levels: missing('LogLevel INFO WARNING ERROR VERBOSE', pb_utils.Logger)
  no TritonInferenceException: hasattr(pb_utils, 'TritonInferenceException')
  module of the classes:
    sorted({getattr(pb_utils, name).__module__ for name in 'Tensor InferenceRequest InferenceResponse \
    TritonError TritonModelException PreferredMemory'.split()})
  free_memory: hasattr(c_python_backend_utils.shared_memory, 'free_memory')
  get_model_dir: pb_utils.get_model_dir().split('/')[-2:]
1.1 TRITON_STRING_TO_NUMPY
  all: sorted((name, np.dtype(kind).name) for name, kind in pb_utils.TRITON_STRING_TO_NUMPY.items())
  lookup: pb_utils.triton_string_to_numpy('TYPE_FP16').__name__
  unknown: raises(lambda: pb_utils.triton_string_to_numpy('TYPE_BF16'))
1.1 flags
  sequences:
    pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
  final: int(FINAL)
  release: pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL, pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
1.1 serialize_byte_tensor
  objects:
    pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object)).hex() if \
    hasattr(pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object)), 'hex') else \
    type(pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object))).__name__
  empty: pb_utils.serialize_byte_tensor(np.array([], object))
  numbers: pb_utils.serialize_byte_tensor(np.zeros(3))
1.1 deserialize_bytes_tensor
  two: pb_utils.deserialize_bytes_tensor(b'\1\0\0\0a\2\0\0\0bc')
1.1 get_…_by_name
  input: show(pb_utils.get_input_tensor_by_name(request(), 'B'))
  no input: pb_utils.get_input_tensor_by_name(request(), 'X')
  output: show(pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor('O')]), 'O'))
  no output: pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([]), 'O')
  configuration:
    [pb_utils.get_input_config_by_name(json.loads(self.args['model_config']), name) is None for name \
    in ('CODE', 'X')] + [pb_utils.get_output_config_by_name(json.loads(self.args['model_config']), \
    'SAID')['dims']]
1.1 transaction policy
  this: pb_utils.using_decoupled_model_transaction_policy(json.loads(self.args['model_config']))
1.1 numbered types
  to numpy: [np.dtype(pb_utils.triton_to_numpy_type(number)).name for number in range(1, 14)]
  from numpy:
    [pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) for number in range(1, 14)]
  bytes: pb_utils.numpy_to_triton_type(np.bytes_)
  unknown: pb_utils.numpy_to_triton_type(np.dtype('c8'))
1.3 TritonError
  default: pb_utils.TritonError('text').code() == pb_utils.TritonError.INTERNAL
  message: pb_utils.TritonError('text').message()
  keyword: pb_utils.TritonError(message='text').message()
  codes:
    missing('UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED', \
    pb_utils.TritonError)
  code shows: str(pb_utils.TritonError('text', pb_utils.TritonError.NOT_FOUND).code())
  None: raises(lambda: pb_utils.TritonError(None))
  None as code: raises(lambda: pb_utils.TritonError('text', None))
1.3 code at the client
  UNKNOWN:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.UNKNOWN))
  INTERNAL:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.INTERNAL))
  NOT_FOUND:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.NOT_FOUND))
  INVALID_ARG:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.INVALID_ARG))
  UNAVAILABLE:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.UNAVAILABLE))
  UNSUPPORTED:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.UNSUPPORTED))
  ALREADY_EXISTS:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.ALREADY_EXISTS))
  CANCELLED:
    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', \
    pb_utils.TritonError.CANCELLED))
1.3 TritonModelException
  base: [base.__name__ for base in pb_utils.TritonModelException.__mro__]
  made by a model: raises(lambda: (_ for _ in ()).throw(pb_utils.TritonModelException('x')))
1.4 Tensor
  keywords: raises(lambda: pb_utils.Tensor(name='A', numpy_array=np.zeros(1)))
  name: tensor('A').name()
  empty name: raises(lambda: tensor(''))
  dtype: raises(lambda: pb_utils.Tensor('A', np.zeros(1, np.complex64)))
  unicode: raises(lambda: pb_utils.Tensor('A', np.array(['a'])))
  None: raises(lambda: pb_utils.Tensor('A', None))
  shape: type(tensor().shape()).__name__, tensor().shape()
  is_cpu: tensor().is_cpu()
  triton_dtype: raises(lambda: tensor().triton_dtype())
  strings: tensor('A', [b'a', b'b'], object)
  text: tensor('A', ['a', 'b'], object)
  not contiguous: pb_utils.Tensor('A', np.arange(12).reshape(3, 4)[::2, 1:])
  every type:
    [pb_utils.Tensor('A', np.ones(2, pb_utils.triton_to_numpy_type(number))).as_numpy().dtype.name for \
    number in range(1, 13)]
1.4 DLPack
  capsule: 'dltensor' in repr(tensor().to_dlpack())
  device: [int(number) for number in tensor().__dlpack_device__()]
  round trip: pb_utils.Tensor.from_dlpack('B', tensor().to_dlpack())
  from a capsule: pb_utils.Tensor.from_dlpack('B', np.arange(3, dtype=np.int16).__dlpack__())
  from an object: pb_utils.Tensor.from_dlpack('B', np.arange(3, dtype=np.int16))
  to NumPy: np.from_dlpack(tensor())
  bool: pb_utils.Tensor.from_dlpack('B', tensor('A', [True, False], bool).to_dlpack())
  strings: raises(lambda: tensor('A', [b'a'], object).to_dlpack())
  something else: raises(lambda: pb_utils.Tensor.from_dlpack('B', 3))
  not contiguous:
    raises(lambda: pb_utils.Tensor.from_dlpack('B', np.arange(12).reshape(3, 4)[:, ::2].__dlpack__()))
  empty name: raises(lambda: pb_utils.Tensor.from_dlpack('', tensor().to_dlpack()))
  stride of a dim of one: pb_utils.Tensor.from_dlpack('B', np.zeros((4, 2))[::4].__dlpack__()).shape()
  reference count:
    import sys
    t = tensor()
    before = sys.getrefcount(t)
    c = t.to_dlpack()
    during = sys.getrefcount(t)
    del c
    said = during - before, sys.getrefcount(t) - before
  used up:
    c = tensor().to_dlpack()
    pb_utils.Tensor.from_dlpack('B', c)
    said = 'used_dltensor' in repr(c)
  nothing in it: pb_utils.Tensor.from_dlpack('B', tensor('A', []).to_dlpack()).shape()
1.5 PreferredMemory
  both: bool(pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0))
  keywords:
    bool(pb_utils.PreferredMemory(preferred_memory_type=pb_utils.TRITONSERVER_MEMORY_GPU, \
    preferred_device_id=0))
  None: raises(lambda: pb_utils.PreferredMemory(None))
  in a call: request(preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)).exec()
1.5 InferenceTrace
  of a request without one: given.trace().get_context()
  class: type(given.trace()).__name__
  passed on: request(trace=given.trace()).exec()
1.6 arguments
  request_id=None: raises(lambda: request(request_id=None))
  correlation_id=None: raises(lambda: request(correlation_id=None))
  inputs=None: raises(lambda: request(inputs=None))
  requested_output_names=None: raises(lambda: request(requested_output_names=None))
  model_name=None: raises(lambda: request(model_name=None))
  model_version=None: raises(lambda: request(model_version=None))
  flags=None: raises(lambda: request(flags=None))
  timeout=None: raises(lambda: request(timeout=None))
  preferred_memory=None: raises(lambda: request(preferred_memory=None))
  trace=None: raises(lambda: request(trace=None))
  parameters=None: request(parameters=None).parameters()
  required: raises(lambda: pb_utils.InferenceRequest(model_name='m'))
  bytes for text:
    request(request_id=b'i', model_name=b'api_add', requested_output_names=[b'SUM']).exec()
  correlation id: raises(lambda: request(correlation_id=1.5))
  input None: raises(lambda: request(inputs=[None], request_id='7'))
  output empty: raises(lambda: request(requested_output_names=[''], request_id='7'))
  parameters no dict: raises(lambda: request(parameters=[1]))
  parameters key: raises(lambda: request(parameters={1: 2}))
  parameters value: raises(lambda: request(parameters={'a': 1.5}))
1.6 accessors
  defaults:
    [request().request_id(), request().correlation_id(), request().flags(), request().timeout(), \
    request().parameters()]
  inputs: [t.name() for t in request().inputs()], type(request().inputs()).__name__
  names:
    sorted(request(requested_output_names=['B', 'A', 'B']).requested_output_names()), \
    type(request().requested_output_names()).__name__
  string id: request(correlation_id='five').correlation_id()
  set_flags:
    r = request()
    r.set_flags(2)
    said = r.flags()
  set_flags None: raises(lambda: request().set_flags(None))
  parameters: json.loads(request(parameters={'a': 1, 'b': True, 'c': 'x'}).parameters())
  parameters as text: request(parameters={'a': 1, 'b': 'x'}).parameters()
  is_cancelled: given.is_cancelled()
  response sender: type(given.get_response_sender()).__name__
1.6 what the called model sees
  nothing given: seen()
  everything: seen(request_id='me', correlation_id=5, flags=3, timeout=10000000)
  string correlation id: seen(correlation_id='five')
  parameters: seen(parameters={'a': 1, 'b': True, 'c': 'x'})
1.6 exec
  answer: request().exec()
  outputs asked: request(requested_output_names=['SUM']).exec()
  model raises:
    request(inputs=[tensor('A', [-1, 0]), tensor('B')]).exec().error().message().split('At:')[0]
  model answers an error: request(inputs=[tensor('A', [-2, 0]), tensor('B')]).exec()
  unknown model: request(model_name='nope').exec().error().message()
  unknown version: request(model_version=7).exec().error().message()
  missing input: request(inputs=[tensor('A')]).exec().error().message()
  wrong type: request(inputs=[tensor('A'), tensor('B', [1, 2], np.int32)]).exec().error().message()
  unknown output: request(requested_output_names=['NOPE']).exec().error().message()
  decoupled model: many('pass').exec().error().message()
  before execute: self.early
  before execute, async: self.early_async
  without a loop: raises(lambda: request().async_exec())[0]
1.6 async_exec @api_coroutine
  answer:
    r = await call(1).async_exec()
    return r.output_tensors()[0].as_numpy().tolist()
  many at once:
    rs = await asyncio.gather(*[call(i).async_exec() for i in range(20)])
    return [float(r.output_tensors()[0].as_numpy()[0]) for r in rs]
  error: return (await call(-2).async_exec()).error().message()
  decoupled: return [len(r.output_tensors()) for r in await call(1).async_exec(decoupled=True)][0]
1.7 InferenceResponse
  None: raises(lambda: pb_utils.InferenceResponse(None))
  nothing: pb_utils.InferenceResponse().output_tensors()
  element None: raises(lambda: pb_utils.InferenceResponse([None]))
  keywords: pb_utils.InferenceResponse(output_tensors=[tensor()], error=None).has_error()
  error:
    r = pb_utils.InferenceResponse(error=pb_utils.TritonError('x'))
    said = [r.has_error(), r.error().message(), len(r.output_tensors())]
  no error: pb_utils.InferenceResponse([tensor()]).error()
  an error hides tensors: show(pb_utils.InferenceResponse([tensor()], pb_utils.TritonError('x')))
  parameters: json.loads(pb_utils.InferenceResponse([], parameters={'a': 1}).parameters())
  parameters key: raises(lambda: pb_utils.InferenceResponse([], parameters={1: 2}))
  parameters value: raises(lambda: pb_utils.InferenceResponse([], parameters={'a': 1.5}))
  outputs not asked for: [t.name() for t in request().exec().output_tensors()]
1.8 send
  flag:
    [show(r) for r in many('sender.send(refused(lambda: sender.send(answer(1), 2)), \
    FINAL)').exec(decoupled=True)][0]
  nothing:
    [show(r) for r in many('sender.send(refused(lambda: sender.send()), \
    FINAL)').exec(decoupled=True)][0]
  keywords:
    [show(r) for r in many('sender.send(response=answer(1), flags=0); \
    sender.send(flags=FINAL)').exec(decoupled=True)]
  None as flags:
    [show(r) for r in many('sender.send(wrong(lambda: sender.send(answer(1), None)), \
    FINAL)').exec(decoupled=True)][0]
  error:
    [show(r) for r in many('sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("x")), \
    FINAL)').exec(decoupled=True)]
  close:
    [show(r) for r in many('sender.send(answer(hasattr(sender, "close")), \
    FINAL)').exec(decoupled=True)][0]
  is_cancelled:
    [show(r) for r in many('sender.send(answer(sender.is_cancelled()), FINAL)').exec(decoupled=True)][0]
  constructor: raises(lambda: c_python_backend_utils.InferenceResponseSender())
1.8 of a model that is not decoupled
  final before a response:
    s = given.get_response_sender()
    said = raises(lambda: s.send(flags=FINAL))
  closed:
    s = given.get_response_sender()
    s.send(pb_utils.InferenceResponse([tensor('SAID', [b'sent'], object)]), FINAL)
    self.kept = raises(lambda: s.send(flags=FINAL))
    answer = pb_utils.InferenceResponse([tensor('SAID', [b'returned'], object)])
1.9 ResponseIterator
  class: type(many('sender.send(flags=FINAL)').exec(decoupled=True)).__name__
  no response: [show(r) for r in many('sender.send(flags=FINAL)').exec(decoupled=True)]
  responses:
    [show(r) for r in many('for i in range(3): \
    sender.send(answer(i))\nsender.send(flags=FINAL)').exec(decoupled=True)]
  begins again:
    it = many('sender.send(answer(1), FINAL)').exec(decoupled=True)
    said = [[show(r) for r in it] for _ in range(2)]
  resumes:
    it = many('sender.send(answer(1)); sender.send(answer(2), FINAL)').exec(decoupled=True)
    first = show(next(it))
    said = first, [show(r) for r in it]
  StopIteration:
    it = many('sender.send(flags=FINAL)').exec(decoupled=True)
    list(it)
    said = raises(lambda: next(it))
  not decoupled: [show(r) for r in request().exec(decoupled=True)]
  error: [show(r) for r in request(inputs=[tensor('A', [-2, 0]), tensor('B')]).exec(decoupled=True)]
  unknown model: [r.error().message() for r in request(model_name='nope').exec(decoupled=True)]
  cancel:
    it = many('import time\nsender.send(answer("begun"))\nuntil = time.monotonic() + 9\nwhile not \
    sender.is_cancelled() and time.monotonic() < until: \
    time.sleep(0.01)\nsender.send(answer("stopped"), FINAL)').exec(decoupled=True)
    first = show(next(it))
    it.cancel()
    said = first, [show(r) for r in it]
1.10 Logger
  calls:
    [getattr(pb_utils.Logger, name)('from the API probe') for name in ('log', 'log_info', 'log_warn', \
    'log_error', 'log_verbose')]
  level: pb_utils.Logger.log('from the API probe', pb_utils.Logger.VERBOSE)
  keywords: pb_utils.Logger.log(message='from the API probe', level=pb_utils.Logger.INFO)
  None: raises(lambda: pb_utils.Logger.log_info(None))
  number: raises(lambda: pb_utils.Logger.log_info(3))
  level number: raises(lambda: pb_utils.Logger.log('x', 1))
1.13 initialize
  arguments: sorted(self.args)
  all text: sorted({type(value).__name__ for value in self.args.values()})
  values:
    [self.args[name] for name in ('model_instance_kind', 'model_instance_device_id', 'model_name', \
    'model_version')], self.args['model_repository'].split('/')[-1]
  instance name: self.args['model_instance_name'].startswith('api_0')
  configuration:
    [json.loads(self.args['model_config'])[name] for name in ('name', 'backend', 'max_batch_size')]
1.13 execute of a decoupled model
  returns a list: [show(r).split('message: ')[1] for r in many('returned = []').exec(decoupled=True)][0]
1.13 inputs may be edited
  in place:
    a = given.inputs()[0].as_numpy()
    a[0] = b'edited'
    said = given.inputs()[0].as_numpy()
1.11 MetricFamily
  kinds: [hasattr(pb_utils.MetricFamily, kind) for kind in 'COUNTER GAUGE HISTOGRAM'.split()]
  keywords:
    type(pb_utils.MetricFamily(name='api_keywords', description='asked', \
    kind=pb_utils.MetricFamily.GAUGE)).__name__
  kind missing: raises(lambda: pb_utils.MetricFamily('api_none', 'asked'))
  kind of a wrong type: raises(lambda: pb_utils.MetricFamily('api_none', 'asked', 'COUNTER'))
  again, of the same kind:
    of = lambda: pb_utils.MetricFamily('api_twice', 'asked', pb_utils.MetricFamily.COUNTER)
    a, b = of(), of()
    x, y = a.Metric({'of': 'api'}), b.Metric({'of': 'api'})
    x.increment(2)
    y.increment(3)
    said = x.value(), y.value()
  again, of another kind:
    a = pb_utils.MetricFamily('api_kinds', 'asked', pb_utils.MetricFamily.COUNTER)
    said = raises(lambda: pb_utils.MetricFamily('api_kinds', 'asked', pb_utils.MetricFamily.GAUGE))
  gone before its metric: f, m = metric('gone', 'COUNTER'); del f; said = raises(lambda: m.increment(1))
1.11 Metric
  labels are no dictionary:
    f = pb_utils.MetricFamily('api_labels', 'asked', pb_utils.MetricFamily.COUNTER)
    said = raises(lambda: f.Metric(labels=['a']))
  no labels:
    f = pb_utils.MetricFamily('api_plain', 'asked', pb_utils.MetricFamily.COUNTER)
    m = f.Metric()
    m.increment(1)
    said = m.value()
  same labels:
    f = pb_utils.MetricFamily('api_same', 'asked', pb_utils.MetricFamily.GAUGE)
    a, b = f.Metric({'of': 'api'}), f.Metric({'of': 'api'})
    a.set(4)
    said = b.value()
  buckets are no list:
    f = pb_utils.MetricFamily('api_no_list', 'asked', pb_utils.MetricFamily.HISTOGRAM)
    said = raises(lambda: f.Metric(labels={}, buckets=3))
  buckets of a counter:
    f = pb_utils.MetricFamily('api_buckets', 'asked', pb_utils.MetricFamily.COUNTER)
    said = raises(lambda: f.Metric(labels={}, buckets=[1.0]))
  histogram without buckets:
    f = pb_utils.MetricFamily('api_bare', 'asked', pb_utils.MetricFamily.HISTOGRAM)
    said = raises(lambda: f.Metric(labels={}))
1.11 counter
  increment: f, m = metric('counts', 'COUNTER'); m.increment(2); m.increment(0.5); said = m.value()
  negative: f, m = metric('down', 'COUNTER'); said = raises(lambda: m.increment(-1))
  observe: f, m = metric('observed', 'COUNTER'); said = raises(lambda: m.observe(1))
  text: f, m = metric('text', 'COUNTER'); said = raises(lambda: m.increment('1'))
1.11 gauge
  set and increment: f, m = metric('gauge', 'GAUGE'); m.set(5); m.increment(-2.5); said = m.value()
  observe: f, m = metric('gauge_observed', 'GAUGE'); said = raises(lambda: m.observe(1))
1.11 histogram
  observe: f, m = metric('seen', 'HISTOGRAM', [1.0, 2.0]); said = m.observe(1.5)
  value: f, m = metric('h_value', 'HISTOGRAM', [1.0]); said = raises(lambda: m.value())
  increment: f, m = metric('h_more', 'HISTOGRAM', [1.0]); said = raises(lambda: m.increment(1))
  set: f, m = metric('h_set', 'HISTOGRAM', [1.0]); said = raises(lambda: m.set(1))
1.12 is_model_ready
  itself: pb_utils.is_model_ready('api')
  its version: pb_utils.is_model_ready(model_name='api', model_version='1')
  another version: raises(lambda: pb_utils.is_model_ready('api', '7'))
  nobody: raises(lambda: pb_utils.is_model_ready('nobody'))
  no version: raises(lambda: pb_utils.is_model_ready('api', 'first'))
  number: raises(lambda: pb_utils.is_model_ready('api', 1))
1.12 load_model, unload_model
  load without --model-control-mode=explicit: raises(lambda: pb_utils.load_model('api_add'))
  unload without --model-control-mode=explicit: raises(lambda: pb_utils.unload_model('api_add'))
  files are no dictionary: raises(lambda: pb_utils.load_model('api_add', '{}', ['file:1/model.py']))
  text instead of a name: raises(lambda: pb_utils.load_model(3))
"""
# Triton 2.51 answers nothing after this one.
_LAST = r"""\
1.11 counter
  set: f, m = metric('set', 'COUNTER'); said = raises(lambda: m.set(1))
"""
CASES = (*_cases(_TEXT), *_cases(_LAST))
