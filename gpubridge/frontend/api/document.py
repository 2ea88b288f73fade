"""The OpenAPI document: built when it is asked for, once a second at most, in turns with other work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import orjson

import gpubridge
from gpubridge.config import ModelConfig
from gpubridge.config.openai import openai_endpoints
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.frontend.control import JSON, Answer
from gpubridge.protocol.openapi import MOST_TENSORS, model_paths, openapi_head
from gpubridge.protocol.openapi_chat import chat_paths

_FRESH_SECONDS = 1.0
_MODELS_A_TURN = 8
_MOST_BYTES = 8 << 20
_MOST_NAMES = 256
"""Models that a path of OpenAI's API lists."""
_FIELDS = JSON + b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"


class OpenApiDocument:
    """Builds the document of the ready models; keeps the text of a model while its configuration stays.

    ``most``: bytes of the document beyond which further models are left out, and counted.
    """

    def __init__(self, repository: ModelRepository, most: int = _MOST_BYTES) -> None:
        self._repository = repository
        self._most = most
        self._texts: WeakKeyDictionary[ModelConfig, bytes] = WeakKeyDictionary()
        self._answer = Answer()
        self._built = -_FRESH_SECONDS
        self._building: asyncio.Task[None] | None = None

    async def answer(self) -> Answer:
        """Return the response with the document."""
        if time.monotonic() - self._built >= _FRESH_SECONDS:
            if self._building is None:
                self._building = asyncio.get_running_loop().create_task(self._build())
            await self._building
        return self._answer

    async def _build(self) -> None:
        try:
            self._answer = Answer(await self._text(), _FIELDS, plain=False)
            self._built = time.monotonic()
        finally:
            self._building = None

    async def _text(self) -> bytes:
        repository = self._repository
        # Of each name the highest version, which requests without one get.
        ready = sorted(
            (each.name, each.version, each) for each in repository.loaded() if each.ready
        )
        configs = {name: model.config for name, _, model in ready}
        texts: list[bytes] = []
        described: list[ModelConfig] = []
        left_out = size = 0
        for at, config in enumerate(configs.values()):
            if at % _MODELS_A_TURN == 0:
                await asyncio.sleep(0)
            text = self._paths(config)
            if text and size + len(text) <= self._most:
                size += len(text)
                texts.append(text)
                described.append(config)
            else:
                left_out += 1
        chats = orjson.dumps(chat_paths(_served_by_openai(described)))[1:-1]
        if chats:
            texts.append(chats)
        head = orjson.dumps(openapi_head(repository.server_id, gpubridge.__version__, left_out))
        return head[:-1] + b',"paths":{' + b",".join(texts) + b"}}"

    def _paths(self, config: ModelConfig) -> bytes:
        """Return the members of ``paths`` of a model; nothing if it has too many tensors, or too long ones."""
        if len(config.inputs) + len(config.outputs) > MOST_TENSORS:
            return b""
        text = self._texts.get(config)
        if text is None:
            text = orjson.dumps(model_paths(config))[1:-1]
            # What is never shown is not kept.
            text = self._texts[config] = text if len(text) <= self._most else b""
        return text


def _served_by_openai(configs: Iterable[ModelConfig]) -> dict[str, list[str]]:
    """Return the names of the first models that serve each endpoint of OpenAI's API."""
    found: dict[str, list[str]] = {}
    for config in configs:
        for endpoint in openai_endpoints(config):
            names = found.setdefault(endpoint, [])
            if len(names) < _MOST_NAMES:
                names.append(config.name)
    return found
