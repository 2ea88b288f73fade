"""Writes the generated pages of docs/reference: ``python -m tests.codebase.references``.

Each is made of what the code declares: flags of the settings' fields, the configuration of its protobuf
schema, metrics of the families that the server makes.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gpubridge.config import validate
from gpubridge.engine.devices.copies import PEER_FALLBACKS
from gpubridge.schema import schema_pool
from gpubridge.telemetry import machine_metrics, metrics
from gpubridge.telemetry.settings import MetricsSettings
from gpubridge.transport.messages import FALLBACKS
from tests.codebase import flag_reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
WRITTEN_BY = """\
This file is written by `python -m tests.codebase.references` from {source}; a test keeps it so.
"""
CONFIG_HEAD = f"""\
# config.pbtxt

{WRITTEN_BY.format(source="the schema of the configuration (`gpubridge/schema/model_config.proto`)")}
A model's configuration is a protobuf message in text form. All fields are known, with Triton's names; the
[table of compatibility](compatibility.md#configpbtxt) says how each is served. A field that is refused stops the
model from loading, a field without effect is a warning. `GET /v2/models/NAME/config` shows the whole with its
defaults.
"""
METRICS_HEAD = f"""\
# Metrics

{WRITTEN_BY.format(source="the families that the server makes")}
`http://HOST:8002/metrics` has Prometheus' text form. Names that begin with `nv_` are Triton's, those with
`gpubridge_` ours; [models](compatibility.md#metrics-of-models) may add others. Families of a model have the labels
`model`, `version` and those of its `metric_tags`; those of a GPU `gpu_uuid`. Summaries and latencies follow
`--metrics-config`, as at Triton; `--metrics-histograms=false` leaves out `gpubridge_request_duration_seconds` and
`gpubridge_batch_size`, which a model has from its first request on.

| name | kind | |
| --- | --- | --- |
"""
METRICS_TAIL = """
`nv_inference_exec_count` and `gpubridge_batch_size` count calls of `execute` that came back, whatever became of their
requests; `nv_inference_count` and durations are of requests that succeeded. A request's durations end when it has its last response and
`execute` has come back: what a model sends after that counts for `compute_infer`. An ensemble counts an execution for each request that succeeded, and the time of
its requests to members as `compute_infer`.
`nv_inference_request_failure` has the label `reason`: `BACKEND` (an error of the model, or the end of its process), `REJECTED` (by its
scheduler: a time-out, a full queue, a sequence that has not begun; or by an unload), `CANCELED`, and `OTHER` (what was refused before the
model had it: malformed, not fit for its inputs, no memory for it; of an ensemble, whatever failed in it). Triton counts none of those that
do not fit, and a client's fifty 400s are in no metric of it.
`gpubridge_http_requests_total` and `gpubridge_grpc_requests_total` count all requests that were answered, also those that no model
sees, by `endpoint` (`infer`, `generate`, `health`, ...; `ModelInfer`, ...; `other` for an unknown path: never a client's text) and `code` (the HTTP
status; the name of the gRPC status). Errors within a stream of gRPC are counted at their models; the stream's own status counts once. A client that leaves before its answer
is counted with the code 499, as nginx has it, or `CANCELLED`.
`gpubridge_model_state` has the label `state`, the model's [condition](status.md#conditions): `ready`, `degraded`, `restarting`, `failed`,
`loading` or `unloading`; one of them is 1. A model that was unloaded on purpose has none; one whose versions are
not known has an empty `version`. `gpubridge_model_state{state="failed"} == 1` is a model that should be served and is not.
`gpubridge_copied_bytes_total` and `gpubridge_copies_total` have the label `kind`: `host` (in host memory), `h2d`,
`d2h`, `d2d` (on one GPU) and `p2p` (from GPU to GPU). The [copy budgets](copy-budgets.md) say how many there may be.
`gpubridge_fallbacks_total` has the label `reason`: why a slower path was taken. The log has the details.

| reason | |
| --- | --- |
"""


def config_document() -> str:
    """The page of the fields of config.pbtxt."""
    config = schema_pool().FindMessageTypeByName("inference.ModelConfig")
    return "\n".join([CONFIG_HEAD, *(_message_section(each) for each in _reachable(config))])


def _reachable(message: Any) -> list[Any]:
    """A message and those that its fields hold, each once, in the order of first use."""
    found: dict[str, Any] = {}

    def visit(each: Any) -> None:
        if each.full_name in found:
            return
        found[each.full_name] = each
        for field in each.fields:
            if field.message_type is not None:
                visit(_element(field))

    visit(message)
    return list(found.values())


def _element(field: Any) -> Any:
    """The message of a field; of a map, the message of its values, or the map's entry."""
    kind = field.message_type
    if kind.GetOptions().map_entry:
        return kind.fields_by_name["value"].message_type or kind
    return kind


def _message_section(message: Any) -> str:
    if message.GetOptions().map_entry:
        return ""
    title = message.full_name.removeprefix("inference.")
    comment = _comments().get(title, "")
    rows = [
        f"| `{field.name}` | {_type(field)} | {_effect(message, field)} |"
        for field in message.fields
    ]
    table = (
        "\n".join(["| field | type | |", "| --- | --- | --- |", *rows]) if rows else "No fields."
    )
    return f"## {title}\n\n" + (f"{comment}\n\n" if comment else "") + f"{table}\n"


def _comments() -> dict[str, str]:
    text = (ROOT / "gpubridge" / "schema" / "model_config.proto").read_text()
    return {name: said for said, name in re.findall(r"^// (.+)\nmessage (\w+)", text, re.MULTILINE)}


def _type(field: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return f"map of {_type(key)} to {_type(value)}"
    if field.message_type is not None:
        title = field.message_type.full_name.removeprefix("inference.")
        named = f"[{title}](#{title.lower().replace('.', '')})"
    elif field.enum_type is not None:
        named = ", ".join(f"`{value.name}`" for value in field.enum_type.values)
    else:
        named = next(
            name.removeprefix("TYPE_").lower()
            for name, number in type(field).__dict__.items()
            if name.startswith("TYPE_") and number == field.type
        )
    return f"list of {named}" if field.is_repeated else named


def _effect(message: Any, field: Any) -> str:
    parts = []
    if field.containing_oneof is not None:
        parts.append(f"one of `{field.containing_oneof.name}`")
    if message.full_name == "inference.ModelConfig":
        if field.name in validate._FIELDS:
            parts.append("refused")
        if field.name in validate._IGNORED_FIELDS:
            parts.append(f"no effect: {validate._IGNORED_FIELDS[field.name]}")
    return "; ".join(parts)


def metrics_document() -> str:
    """The page of the families of metrics."""
    rows = [f"| `{name}` | {kind} | {text} |" for name, (kind, text) in sorted(_families().items())]
    reasons = [f"| `{name}` | {text} |" for name, text in {**FALLBACKS, **PEER_FALLBACKS}.items()]
    return METRICS_HEAD + "\n".join([*rows, METRICS_TAIL]) + "\n".join([*reasons, ""])


def _families() -> dict[str, tuple[str, str]]:
    settings = MetricsSettings(counter_latencies=True)
    nothing = SimpleNamespace(families=list)
    with mock.patch.object(metrics, "render", list):
        made: Any = metrics.metrics_page([], nothing, settings)
    found = {family.name: (family.kind, family.text) for family in made}
    for name, text, *_ in machine_metrics._FAMILIES:
        found[name] = ("counter" if name == machine_metrics._ENERGY else "gauge", text)
    return found | {name: (kind, text) for name, text, kind in _declared()}


def _declared() -> Iterator[tuple[str, str, str]]:
    """The families whose name, text and kind stand in the source."""
    for path in sorted((ROOT / "gpubridge").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Family":
                values = list(_constants(node.args))
                if len(values) == len(node.args) == 3:
                    yield values[0], values[1], values[2]
            elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
                # A gauge of the machine: its name, its text and its value.
                values = list(_constants(node.elts[:2]))
                if len(values) == 2 and str(values[0]).startswith("nv_cpu_"):
                    yield values[0], values[1], "gauge"


def _constants(nodes: Iterable[ast.expr]) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant))


PAGES: dict[Path, Callable[[], str]] = {
    FOLDER / "flags.md": flag_reference.document,
    FOLDER / "config.md": config_document,
    FOLDER / "metrics.md": metrics_document,
}

if __name__ == "__main__":
    for page, document in PAGES.items():
        page.write_text(document())
