"""``POST /v1/generate``: a continuation of a prompt, each word sent as soon as it is written (server-sent events).

Imports torch: who serves asks the manifest first whether its model writes text.
"""

import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from annotated_types import Ge, Le
from fastapi import APIRouter, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from fulltilt.errors import UsageError, describe_error
from fulltilt.infer.artefact import Artefact, open_eager
from fulltilt.infer.gates.effect import is_eager
from fulltilt.infer.generate.decoding import Sampling, Writer, find_writer
from fulltilt.infer.serve.wire import read_deadline_s
from fulltilt.records.words import WordTable

MAX_WAITING = 16
MAX_NEW_TOKENS = 4096


class GenerateBody(Sampling):
    """A prompt as text or as numbers of words, and how to write on."""

    prompt: str | None = None
    tokens: list[Annotated[int, Ge(0)]] | None = None
    max_new_tokens: Annotated[int, Ge(1), Le(MAX_NEW_TOKENS)] = 64


class TextService:
    """Writes for one request at a time; others wait in their order, up to ``max_waiting``.

    Args:
        table: Turns text into numbers and back; without it a prompt has to be numbers.
    """

    def __init__(self, writer: Writer, table: WordTable | None, *, max_waiting: int = MAX_WAITING) -> None:
        self._writer, self._table, self.max_waiting, self.n_inside = writer, table, max_waiting, 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generate")

    def read_prompt(self, body: GenerateBody) -> list[int]:
        """Return the numbers of the prompt.

        Raises:
            UsageError: there is none, its words are not the model's, or it is too long.
        """
        if (body.prompt is None) == (body.tokens is None):
            raise UsageError("give either prompt, a text, or tokens, the numbers of its words")
        tokens = body.tokens
        if tokens is None:
            if self._table is None:
                raise UsageError("the words of this model are not kept with it, so give tokens instead of a prompt")
            tokens = self._table.encode(body.prompt or "")
        if max(tokens, default=0) >= self._writer.n_vocabulary:
            raise UsageError(f"tokens hold {max(tokens)}, the model knows words 0 to {self._writer.n_vocabulary - 1}")
        self._writer.check_lengths([tokens], body.max_new_tokens)
        return tokens

    async def stream(
        self, prompt: Sequence[int], body: GenerateBody, deadline_s: float = math.inf
    ) -> AsyncGenerator[str, None]:
        """Yield an event for each word, then a summary. Whoever stops listening stops the writing.

        Args:
            deadline_s: By the monotonic clock; what is not written by then is not sent.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        is_gone, start_s = False, time.perf_counter()

        def tell(words: Sequence[int]) -> bool:
            loop.call_soon_threadsafe(queue.put_nowait, words[0])
            return is_over()

        def is_over() -> bool:
            return is_gone or time.monotonic() > deadline_s

        def work() -> None:
            if not is_over():
                self._writer([prompt], body.max_new_tokens, tell, body)

        async def read_word() -> int | None:
            left_s = None if deadline_s == math.inf else max(0.0, deadline_s - time.monotonic())
            try:
                return await asyncio.wait_for(queue.get(), left_s)
            except TimeoutError:
                said = f"the deadline passed after {len(times_s)} words; ask for fewer, or give it more time"
                raise UsageError(said) from None

        job = loop.run_in_executor(self._worker, work)
        job.add_done_callback(lambda job: (job.exception(), queue.put_nowait(None)))  # or it says that nobody asked
        times_s: list[float] = []
        try:
            while (word := await read_word()) is not None:
                times_s.append(time.perf_counter() - start_s)
                yield _encode({"token": word} | ({} if self._table is None else {"text": self._table.decode([word])}))
            await job
            yield _encode({"done": True, "n_tokens": len(times_s), "first_token_s": times_s[0], "seconds": times_s[-1]})
        except Exception as error:  # the answer has begun: what went wrong is its last event
            yield _encode({"error": describe_error(error)})
        finally:
            is_gone = True


class Stream(StreamingResponse):
    """Sends events, then calls ``on_end`` and notes the request, also where the client went away before the first."""

    def __init__(self, events: AsyncGenerator[str, None], on_end: Callable[[], None], figures: Any):
        super().__init__(events, media_type="text/event-stream")
        self._on_end, self._figures = on_end, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s = time.monotonic()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            self._figures.note_request(self.status_code, time.monotonic() - begin_s)


def _encode(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def open_text_service(artefact: Artefact, table: WordTable | None) -> TextService:
    """Open the service of an artefact whose model writes text.

    It writes eagerly in fp32, whatever the artefact's engine is: engines have no cache. The model is loaded anew only
    where the artefact answers in another way.
    """
    runner: Any = (artefact if is_eager(artefact.plan) else open_eager(artefact.folder, artefact.manifest)).run
    writer = find_writer(runner.forward)
    assert writer is not None, "as when it was built"
    return TextService(writer, table)


def build_router(service: TextService, host: Any) -> APIRouter:
    """Build the route; the application that includes it checks who asks and how long a body is.

    Args:
        host: Has ``settings``, ``is_draining`` and ``figures``, and counts in ``n_open`` what a drain waits for.
    """
    router = APIRouter()

    def count(n: int) -> None:
        service.n_inside += n
        host.n_open += n

    @router.post("/v1/generate")
    async def generate(request: Request) -> StreamingResponse:
        try:  # of whatever type it says it is: curl -d calls it a form
            body = GenerateBody.model_validate_json(await request.body())
        except ValidationError as error:
            raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in error.errors()]) from None
        deadline_s = read_deadline_s(request, host.settings.deadline_s, time.monotonic())
        if service.n_inside > service.max_waiting:
            raise HTTPException(429, f"{service.n_inside} requests wait already; come later", {"Retry-After": "1"})
        if host.is_draining:
            raise HTTPException(503, "the service is draining; come again later", headers={"Retry-After": "1"})
        try:
            prompt = service.read_prompt(body)
        except UsageError as error:
            raise HTTPException(422, str(error)) from None
        count(1)  # here, since many may come before the first stream begins
        return Stream(service.stream(prompt, body, deadline_s), functools.partial(count, -1), host.figures)

    return router
