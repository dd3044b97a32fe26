"""``POST /v1/generate``: a continuation of a prompt, each word sent as soon as it is written (server-sent events).

Imports torch: who serves asks ``may_write_text`` first.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from fastapi import APIRouter, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from fulltilt.config import config_from_values
from fulltilt.engine.build.assemble import build_workload
from fulltilt.errors import UsageError, describe_error
from fulltilt.infer.generate.decoding import (
    Generate,
    Sampling,
    check_lengths,
    find_generate,
    find_max_length,
    find_vocabulary_size,
)
from fulltilt.infer.manifest import Manifest
from fulltilt.records.words import WordTable

MAX_WAITING = 16
MAX_NEW_TOKENS = 4096


class GenerateBody(BaseModel):
    """A prompt as text or as numbers of words, and how to write on."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str | None = None
    tokens: list[Annotated[int, Ge(0)]] | None = None
    max_new_tokens: Annotated[int, Ge(1), Le(MAX_NEW_TOKENS)] = 64
    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Annotated[int, Gt(0)] | None = None
    seed: Annotated[int, Ge(0)] = 0


class TextService:
    """Writes for one request at a time; others wait in their order, up to ``max_waiting``.

    Args:
        table: Turns text into numbers and back; without it a prompt has to be numbers.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        table: WordTable | None,
        n_words: int,
        max_length: int | None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._generate, self._table, self._n_words, self._max_length = generate, table, n_words, max_length
        self._max_waiting, self._n_inside = max_waiting, 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generate")

    def read_prompt(self, body: GenerateBody) -> list[int]:
        """Return the numbers of the prompt.

        Raises:
            UsageError: there is none, its words are not the model's, or it is too long.
        """
        if (body.prompt is None) == (body.tokens is None):
            raise UsageError("give either prompt, a text, or tokens, the numbers of its words")
        if body.prompt is not None and self._table is None:
            raise UsageError("the words of this model are not kept with it, so a prompt cannot be read; give tokens")
        tokens = body.tokens if body.prompt is None else self._table.encode(body.prompt)  # type: ignore[union-attr]
        assert tokens is not None
        if tokens and max(tokens) >= self._n_words:
            raise UsageError(f"tokens hold {max(tokens)}, the model knows words 0 to {self._n_words - 1}")
        check_lengths([tokens], body.max_new_tokens, self._max_length)
        return tokens

    async def stream(self, prompt: Sequence[int], body: GenerateBody) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each word, then a summary. Whoever stops listening stops the writing."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        is_gone, start_s = False, time.perf_counter()

        def tell(words: Sequence[int]) -> bool:
            loop.call_soon_threadsafe(queue.put_nowait, words[0])
            return is_gone

        def work() -> None:
            if not is_gone:
                sampling = Sampling(temperature=body.temperature, top_k=body.top_k, seed=body.seed)
                self._generate([prompt], body.max_new_tokens, tell, sampling)

        self._n_inside += 1
        job = loop.run_in_executor(self._worker, work)
        job.add_done_callback(lambda _: queue.put_nowait(None))
        times_s: list[float] = []
        try:
            while (word := await queue.get()) is not None:
                times_s.append(time.perf_counter() - start_s)
                yield {"token": word} | ({} if self._table is None else {"text": self._table.decode([word])})
            await job
            yield {"done": True, "n_tokens": len(times_s), "first_token_s": times_s[0], "seconds": times_s[-1]}
        except Exception as error:  # the answer has begun: what went wrong is its last event
            yield {"error": describe_error(error)}
        finally:
            is_gone = True
            self._n_inside -= 1

    def refuse_flood(self) -> None:
        """Raise the 429 of a request for which there is no room."""
        if self._n_inside > self._max_waiting:
            raise HTTPException(
                429, f"{self._n_inside} requests are inside, {self._max_waiting} may wait", headers={"Retry-After": "1"}
            )

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)


def find_text_service(folder: Path, manifest: Manifest) -> TextService | None:
    """Build the service of an artefact whose model writes text; None where it does not.

    The model answers eagerly in fp32, whatever the artefact's engine is: engines have no cache.
    """
    given = manifest.config
    config = config_from_values(given["config"], base_dir=given["base_dir"], provenance=given["provenance"])
    model = build_workload(config).model()
    generate = find_generate(model)
    if generate is None:
        return None
    state = torch.load(folder / "weights.pt", map_location="cpu", weights_only=True)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    model.to(manifest.device).eval()
    table = WordTable.read(folder)
    return TextService(generate, table=table, n_words=find_vocabulary_size(model), max_length=find_max_length(model))


def build_router(service: TextService, host: Any = None) -> APIRouter:
    """Build the route; the application that includes it checks who asks and how long a body is.

    Args:
        host: Has ``is_ready``, and counts in ``n_open`` the requests that a drain waits for.
    """
    router = APIRouter()

    @router.post("/v1/generate")
    async def generate(body: GenerateBody) -> StreamingResponse:
        service.refuse_flood()
        if host is not None and not host.is_ready:
            raise HTTPException(503, "the service is draining", headers={"Retry-After": "1"})
        try:
            prompt = service.read_prompt(body)
        except UsageError as error:
            raise HTTPException(422, str(error)) from None
        return StreamingResponse(_encode(service.stream(prompt, body), host), media_type="text/event-stream")

    return router


async def _encode(events: AsyncGenerator[dict[str, Any], None], host: Any) -> AsyncIterator[str]:
    with _counted(host):
        async with contextlib.aclosing(events):
            async for event in events:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


@contextlib.contextmanager
def _counted(host: Any) -> Iterator[None]:
    if host is None:
        yield
        return
    host.n_open += 1
    try:
        yield
    finally:
        host.n_open -= 1
