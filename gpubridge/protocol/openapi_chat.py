"""The OpenAPI document's paths of OpenAI's API, for the models that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpubridge.protocol.fields import JsonObject

_TEXTS: JsonObject = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_MESSAGES: JsonObject = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
}
_ASKED: dict[str, tuple[str, str, JsonObject, object]] = {
    "chat": (
        "/v1/chat/completions",
        "messages",
        _MESSAGES,
        [{"role": "user", "content": "hello"}],
    ),
    "completions": ("/v1/completions", "prompt", _TEXTS, "hello"),
    "embeddings": ("/v1/embeddings", "input", _TEXTS, "hello"),
}
"""By endpoint: its path, the member that a request needs, the member's schema and an example."""


def chat_paths(models: Mapping[str, Sequence[str]]) -> dict[str, JsonObject]:
    """Return the paths of OpenAI's API; ``models``: the names of those that serve each endpoint."""
    paths = {
        path: _operation(endpoint, models[endpoint])
        for endpoint, (path, *_) in _ASKED.items()
        if models.get(endpoint)
    }
    if paths:
        listed = {"description": "the models", "content": {"application/json": {}}}
        paths["/v1/models"] = {
            "get": {
                "tags": ["OpenAI"],
                "operationId": "openai-models",
                "summary": "models that serve OpenAI's API",
                "responses": {"200": listed},
            }
        }
    return paths


def _operation(endpoint: str, models: Sequence[str]) -> JsonObject:
    _, member, schema, example = _ASKED[endpoint]
    properties = {"model": {"enum": list(models)}, member: schema}
    answers: JsonObject = {"application/json": {"schema": {"type": "object"}}}
    if endpoint != "embeddings":
        properties |= {"stream": {"type": "boolean"}, "max_tokens": {"type": "integer"}}
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    request = {
        "schema": {"type": "object", "required": ["model", member], "properties": properties},
        "example": {"model": models[0], member: example},
    }
    error = {"description": "an error, as OpenAI's clients read it"}
    return {
        "post": {
            "tags": ["OpenAI"],
            "operationId": f"openai-{endpoint}",
            "summary": f"{endpoint} of {', '.join(models)}",
            "requestBody": {"required": True, "content": {"application/json": request}},
            "responses": {
                "200": {"description": "the answer", "content": answers},
                "4XX": error,
                "5XX": error,
            },
        }
    }
