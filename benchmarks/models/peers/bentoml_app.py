"""BentoML: ``bentoml serve bentoml_app:AddSub``, ``:Means`` or ``:Tokens``."""

from collections.abc import AsyncGenerator
from pathlib import Path

import bentoml
import work


@bentoml.service(workers=1)
class AddSub:
    @bentoml.api(route="/add_sub")
    def run(self, INPUT0: list[float], INPUT1: list[float]) -> dict[str, list[float]]:  # noqa: N803
        total, difference = work.add_sub(INPUT0, INPUT1)
        return {"OUTPUT0": total.tolist(), "OUTPUT1": difference.tolist()}


@bentoml.service(workers=1)
class Means:
    @bentoml.api(route="/means")
    def run(self, IMAGE: Path) -> dict[str, list[float]]:  # noqa: N803
        return {"MEANS": work.means(IMAGE.read_bytes()).tolist()}


@bentoml.service(workers=1)
class Tokens:
    @bentoml.api(route="/tokens")
    async def run(self, text_input: str) -> AsyncGenerator[str, None]:
        for token in work.tokens(text_input):
            yield token
