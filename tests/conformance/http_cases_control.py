"""Everything but infer: health, metadata, configuration, repository, shared memory, paths, methods."""

from tests.conformance import deliberate as why
from tests.conformance.http_case import ADD_SUB, Case, get, post

LONG_VERSION = "99999999999999999999"
HEALTH = [
    get("live", "/v2/health/live"),
    get("ready", "/v2/health/ready"),
    get("live with query", "/v2/health/live?verbose=1"),
    post("live by POST", "/v2/health/live"),
    get("health without a word", "/v2/health"),
    get("live with trailing slash", "/v2/health/live/"),
]

METADATA = [
    get("server metadata", "/v2", differs=why.SERVER_NAME),
    get("server metadata with slash", "/v2/"),
    post("server metadata by POST", "/v2"),
    get("model metadata", "/v2/models/add_sub"),
    get("model metadata batched", "/v2/models/add_sub_batched"),
    get("model metadata all dtypes", "/v2/models/identity"),
    get("model metadata reshape", "/v2/models/reshape_scalar"),
    get("model metadata versions all", "/v2/models/versions_all"),
    get("model metadata versions latest", "/v2/models/versions_latest"),
    get("model metadata versions specific", "/v2/models/versions_specific"),
    get("model metadata version 3", "/v2/models/versions_all/versions/3"),
    get("model metadata version not loaded", "/v2/models/versions_latest/versions/1"),
    get("model metadata version unknown", "/v2/models/add_sub/versions/9"),
    get("model metadata version 0", "/v2/models/add_sub/versions/0"),
    get("model metadata version 01", "/v2/models/add_sub/versions/01"),
    get("model metadata version word", "/v2/models/add_sub/versions/x"),
    get("model metadata version negative", "/v2/models/add_sub/versions/-1"),
    get("model metadata version too long", f"/v2/models/add_sub/versions/{LONG_VERSION}"),
    get("model metadata version empty", "/v2/models/add_sub/versions/"),
    get("model metadata unknown model", "/v2/models/nope"),
    get("model metadata percent-encoded", "/v2/models/add%5Fsub", differs=why.ENCODED_NAME),
    post("model metadata by POST", "/v2/models/add_sub"),
    get("model ready", "/v2/models/add_sub/ready"),
    get("model ready version 1", "/v2/models/add_sub/versions/1/ready"),
    get("model ready unknown model", "/v2/models/nope/ready"),
    get("model ready unknown version", "/v2/models/add_sub/versions/9/ready"),
    get("model ready version not loaded", "/v2/models/versions_latest/versions/1/ready"),
    get("model ready version word", "/v2/models/add_sub/versions/x/ready"),
    get("model ready trailing slash", "/v2/models/add_sub/ready/"),
    post("model ready by POST", "/v2/models/add_sub/ready"),
]

CONFIGURATION = [
    get("config", "/v2/models/add_sub/config"),
    get("config batched", "/v2/models/add_sub_batched/config"),
    get("config optional inputs", "/v2/models/optional_input/config"),
    get("config reshape", "/v2/models/reshape/config"),
    get("config empty reshape", "/v2/models/reshape_scalar/config"),
    get("config decoupled", "/v2/models/decoupled/config"),
    get("config versions all", "/v2/models/versions_all/config"),
    get("config versions specific", "/v2/models/versions_specific/versions/1/config"),
    get("config unknown model", "/v2/models/nope/config"),
    get("config unknown version", "/v2/models/add_sub/versions/9/config"),
    post("config by POST", "/v2/models/add_sub/config"),
]

STATISTICS = [
    get("statistics of one version", "/v2/models/versions_specific/versions/1/stats"),
    get("statistics unknown model", "/v2/models/nope/stats"),
    get("statistics unknown version", "/v2/models/add_sub/versions/9/stats"),
    post("statistics by POST", "/v2/models/add_sub/stats"),
]

REPOSITORY = [
    post("repository index", "/v2/repository/index"),
    post("repository index ready only", "/v2/repository/index", b'{"ready":true}'),
    post("repository index ready junk", "/v2/repository/index", b'{"ready":1}'),
    post("repository index not JSON", "/v2/repository/index", b"junk"),
    get("repository index by GET", "/v2/repository/index"),
    post("load in mode none", "/v2/repository/models/add_sub/load"),
    post("unload in mode none", "/v2/repository/models/add_sub/unload"),
    get("load by GET", "/v2/repository/models/add_sub/load"),
]

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
KEY = b'{"key":"/gpubridge_conformance_absent","offset":0,"byte_size":16}'
SHARED_MEMORY = [
    get("system regions none", f"{SYSTEM}/status"),
    get("system region unknown", f"{SYSTEM}/region/r/status"),
    post("system register without key", f"{SYSTEM}/region/r/register", b"{}"),
    post("system register without size", f"{SYSTEM}/region/r/register", b'{"key":"/absent"}'),
    post("system register absent key", f"{SYSTEM}/region/r/register", KEY),
    post("system register not JSON", f"{SYSTEM}/region/r/register", b"junk"),
    post("system register empty", f"{SYSTEM}/region/r/register"),
    post("system unregister unknown", f"{SYSTEM}/region/r/unregister"),
    post("system unregister all", f"{SYSTEM}/unregister"),
    get("system unregister by GET", f"{SYSTEM}/unregister"),
    get("cuda regions none", f"{CUDA}/status"),
    get("cuda region unknown", f"{CUDA}/region/r/status"),
    post("cuda register without handle", f"{CUDA}/region/r/register", b"{}"),
    post(
        "cuda register short handle",
        f"{CUDA}/region/r/register",
        b'{"raw_handle":{"b64":"AAAA"},"device_id":0,"byte_size":16}',
    ),
    post("cuda unregister all", f"{CUDA}/unregister"),
]

PATHS = [
    get("root", "/", differs=why.OWN_PAGES),
    get("other version", "/v3"),
    get("unknown word", "/v2/bogus"),
    get("models alone", "/v2/models"),
    get("models with slash", "/v2/models/"),
    get("unknown word of a model", "/v2/models/add_sub/bogus"),
    get("double slash", "//v2/health/live"),
    get("dot segments", "/v2/models/../health/live"),
    get("metrics on the HTTP port", "/metrics"),
    get("absolute URI", "http://conformance/v2/health/live"),
    get("infer by GET", "/v2/models/add_sub/infer"),
    Case("infer by PUT", "PUT", "/v2/models/add_sub/infer", body=ADD_SUB),
    Case("infer by DELETE", "DELETE", "/v2/models/add_sub/infer"),
    Case("HEAD", "HEAD", "/v2/health/live"),
    Case("OPTIONS", "OPTIONS", "/v2"),
    Case("unknown method", "BREW", "/v2"),
    post("infer unknown model", "/v2/models/nope/infer", ADD_SUB),
    post("infer unknown version", "/v2/models/add_sub/versions/9/infer", ADD_SUB),
    post("infer version not loaded", "/v2/models/versions_latest/versions/1/infer", ADD_SUB),
    post("infer version 1", "/v2/models/add_sub/versions/1/infer", ADD_SUB),
    post("infer version 01", "/v2/models/add_sub/versions/01/infer", ADD_SUB),
    post("infer version word", "/v2/models/add_sub/versions/x/infer", ADD_SUB),
    post("infer version too long", f"/v2/models/add_sub/versions/{LONG_VERSION}/infer", ADD_SUB),
    post("infer unknown model, not JSON", "/v2/models/nope/infer", b"junk"),
]

CASES: list[Case] = [
    *HEALTH,
    *METADATA,
    *CONFIGURATION,
    *STATISTICS,
    *REPOSITORY,
    *SHARED_MEMORY,
    *PATHS,
]
