"""Sets of flags of servers, each shared by files that ask different things of it: a set is one start of a run."""

from tests import run_folder

AGED = (
    "--grpc-max-connection-age=300",
    "--grpc-max-connection-age-grace=3000",
    "--http-restricted-api=openai:api-key=secret",
    "--http-restricted-api=inference:k=1",
    "--http-header-forward-pattern=auth.*|x-a",
)
"""Connections of gRPC end soon, and inference over HTTP needs a key and has headers."""
BARE = ("--allow-status-page=false", "--client-shm-max-regions=3")
"""No page of its status, and few regions of clients' memory."""
FORWARDING = (
    "--http-header-forward-pattern=(x-|MY_).*",
    # What the protocol itself has would be among them.
    "--grpc-header-forward-pattern=(X-|my_|grpc|te|user-agent|content|:|triton).*",
    "--http-restricted-api=statistics:X-Secret=w",
    "--grpc-restricted-protocol=inference:my_key=v",
)
METRICS = (
    "--metrics-config=summary_latencies=true",
    "--metrics-config=histogram_latencies=true",
    "--metrics-config=summary_quantiles=0.5:0.05,1:0",
    "--cache-config=local,size=1048576",
    "--access-log=true",
    *FORWARDING,
)
"""Headers that reach models, metrics of all kinds, an access log, and a cache of responses; inference over gRPC needs a key."""


def named_and_traced() -> tuple[str, ...]:
    """Return flags of a server with the name "mine" and a file of traces, which no request is in unless asked for."""
    return f"--trace-config=triton,file={run_folder.path() / 'trace.json'}", "--id=mine"
