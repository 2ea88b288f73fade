"""Differences seen where the same was put to both servers by hand: no recorded answer keeps these true."""

from tests.unit.model_configs import cases

# Situation; below it Triton, gpubridge, and why.
_TEXT = """\
a start over a repository without models
    is ready with none; `lost+found`, `__pycache__` and hidden folders end it | fails unless
    `--allow-empty-repository=true`; such folders are no models | a wrong prefix of a bucket looks like
    an empty one; file systems and interpreters make such folders
the future of `async_exec` is cancelled, as by `asyncio.wait_for`
    the call is run, and `asyncio.run` waits for it | the call is cancelled | nobody gets its answer
a client does not read what a decoupled model sends
    all of it is kept, without a limit | at most `--response-store-limit` is kept: a request beyond its
    part ends with an error that has both numbers | one client's memory is everybody's
a compressed message that becomes more than 16 times as long, and more than an eighth of
`--request-arena-limit`
    is taken | UNAVAILABLE, with both numbers | a client that sends 1 MB does not get 1 GB
status of a load that a fault in the scheduler's settings or an ensemble's maps prevents
    500, `failed to poll` | 400, `load failed`, with the same reason | the configuration is at fault, not
    the server
a body of `multipart/form-data` for `/infer` or `/generate`
    500: no JSON | its parts are inputs | files are uploaded as any client can
`/generate`, and the model's error has the code UNAVAILABLE
    400 | 503 | as over `/infer`: clients try again later
`--http-header-forward-pattern`, and a request of `/generate`
    its headers do not reach models | they are parameters, as over `/infer` | a defect of Triton
a header that is forwarded twice, or has the name of a parameter
    the name stands twice in the JSON of `request.parameters()` | once, with the last header's value | JSON
    parsers take the last one, too
the header of a restricted endpoint, where the pattern of forwarded headers matches it
    reaches models | does not | its value is a secret
a web page of another origin sends a request, as text or a form; a page whose name leads to this machine
    is served, also loads of models | 403, unless `--http-allowed-origins` lists it
    ([web pages](protocol.md#web-pages)) | who visits a page does not mean to load its code
the header of a restricted endpoint, sent twice
    the first counts | is refused | proxies and servers may take different ones
a restricted endpoint's value that begins with `@`
    is that value | names a file, or with `@env:` a variable | other users see command lines
statistics: requests that a model answers with an error, and no response before it
    are successes | are failures | their clients got an error
statistics: requests that find the queue full, or are of a sequence that has not begun
    are in no count | are failures | every request to a model is in one of the counts
statistics and `nv_inference_request_failure`: requests that are refused before the model has them
(malformed, not fit for its inputs)
    are in no count | are failures, of the reason `OTHER` | fifty 400s are seen
statistics of an ensemble: a request that fails
    counts twice | counts once | it is one request
statistics of an ensemble: queue, inputs and outputs
    sums of its members | 0: all its time is `compute_infer` | its members have their own
statistics: what a decoupled model does after `execute` has returned
    is in no duration | counts until the last response, for `compute_infer` | its client waits for it
a stream with `triton_grpc_error` asks for a model that is not there
    goes on after the error | ends with it | that header asks for gRPC's own errors, and those end a call
an `np.bytes_` in an output's array of objects
    is sent as the text of its `repr` | is sent as its bytes | the data is what the model meant
a model writes into the array of a tensor that it got, and hands on the tensor itself
    what arrived is handed on | what was written, if nothing else holds the tensor | the array is a view,
    not a copy
an output does not have the shape of its configured `reshape`
    a client gets an error, if the counts of elements differ; a calling model gets a wrong shape | both
    get an error with the expected dims | the shape would not be that of the bytes
outputs and parameters of an ensemble's answer
    any order; parameters such as `sequence_id` among them | the configuration's order; no such parameters |
    repeatable
an ensemble does not fit its members when it is loaded, or later, as a member was replaced or unloaded
    the index has its name only, or says `unloaded` | it has its versions and says why | names what to correct
an ensemble is loaded with a configuration that its members do not allow yet
    it is unloaded until they do | is served as before until they do | a load that fails changes nothing
a version failed to load, and its directory was removed
    the server is not ready | is ready | nothing is missing
more `raw_input_contents` than inputs that need them
    taken as if they were not there | 400 with both numbers | at least one of them is misplaced
an input or output that is declared twice
    is taken; two inputs of one name refuse every request | counts once, with a warning; declared in two
    ways it is refused | published configurations have the same twice; which of the two is meant is unclear
`config.pbtxt`: `01` or `0x1` for a truth value; an escape `\\ud83d` without its second half
    are taken | are refused, with the place | no program writes them
JSON of a configuration that a client sends: single quotes, names without quotes, commas before a
bracket
    are taken | are refused | RFC 8259
a configuration with the number of an enumeration's value that has no name, as in `timeout_action:
7`; a `minimum_slot_utilization` of `nan`
    is loaded | is refused, with the names; the utilization with its range | most likely a mistake
KIND_AUTO with `gpus: [ 0 ]`, and there is no GPU
    does not load | runs on the host, with a warning | that is what AUTO asks for
several kinds of control in one `control_input`
    only the last one is sent | is refused | the model would wait for the others
a control input or a state that has the name of an input, or of one another
    takes the place of what clients send | is refused | the model would not get an input that it
    declares
a state of sequences without names or a data type
    is loaded | is refused | the model could not use it
order of `request.inputs()` with control inputs and states
    that of a hash table: chance | inputs in the request's order, then controls, then states |
    repeatable
a control of CONTROL_SEQUENCE_CORRID with a numeric type, and a `sequence_id` that is a string
    the model gets bytes of an address of the server | 400 | a defect of Triton
a control of CONTROL_SEQUENCE_CORRID with TYPE_STRING
    400: the id counts as two strings | the model gets the id | a defect of Triton
a model is loaded with a client's configuration before it was ever loaded from its files; then it is
loaded again without one
    the configuration is that of the files | the client's configuration stays until the files change or
    the model is unloaded, as in all other cases | a load that is repeated changes nothing
files that a client sends with a load: other characters than those of base64 and blanks
    are skipped | 400 | part of a file is no file
`null` for `shared_memory_region`, its offset or its size in parameters of an input or output
    400 or 500 | taken as left out | serializers of optional fields write null
JSON values beside a shape without elements, as `[ 0 ]`
    are ignored, or the request is never answered | 400, as for any other wrong number of values | it is not what the client meant
`classification` of 2^63 and more
    the values of the output | all classes, the most likely first; of strings an error, as for any other
    number | it is a large number of classes
`Content-Encoding` of a request that is no inference: an unknown one, or a body that is not in it
    is ignored, with the body | 501, 400 | a setting that was sent should not be lost silently
`Content-Encoding: gzip` and `deflate` for `/generate`
    400 | are unpacked | as over `/infer`
a body of an unload that is no JSON, or whose parameters are none
    is ignored | 400 | `unload_dependents` may have been meant
strings of a `config.pbtxt` that are not UTF-8
    are loaded | are refused, with the place | protobuf's text is UTF-8
gRPC's certificate is missing, or its key is another's
    `Socket '0.0.0.0:8001' already in use` | the file, and what is wrong with it | the error names what to
    correct
a new certificate
    is read at the next start | is read at SIGHUP, too | certificates are short-lived
`response_cache`: an equal request for other outputs, or with other parameters
    gets the stored response, which may lack outputs | is executed | both reach the model
`response_cache`: a model is loaded again, also from changed files
    its stored responses stay | are removed, with those of ensembles | they may be those of other code
`response_cache`: requests with a `sequence_id`
    are looked up and stored | are executed | a sequence is no question that can be repeated
`response_cache` with `summary_latencies`
    no summary of requests; a summary of hits and of misses | the usual summaries: of hits in those of
    requests and queues only | figures of one model do not vanish with a flag
`response_cache`, and the model answers with an error
    the next equal request gets a response without outputs | errors are not stored | a defect of Triton
`response_cache`: requests with tensors in clients' shared memory
    are looked up and stored | are executed | a client could change them after they were compared
an unknown `trace_level` in a change of the trace settings
    is ignored | 400, with the levels that there are | a misspelt level would trace nothing
`mode=opentelemetry`, and a `traceparent` whose sampled flag is not set
    is traced, as marked in its export | is not traced | the caller has decided, as W3C's parent-based
    sampling says
`mode=opentelemetry`: spans
    no span for the queue; all spans are of the kind SERVER; errors set no status | `queue` beside
    `compute`; only `InferRequest` is of that kind; errors are the status | service graphs count a request
    once, and show what failed
`mode=opentelemetry`: `tracestate` over gRPC
    is lost | is passed on, as over HTTP | W3C asks for it
`mode=opentelemetry`: `level=TENSORS`, a resource without a value, an unknown setting
    is accepted; an error in the log, or no effect | is refused | it would have no effect
"""
BY_HAND = [(situation, *told.split(" | ")) for situation, told in cases(_TEXT)]
