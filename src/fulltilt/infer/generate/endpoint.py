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
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from fulltilt.errors import UsageError, describe_error
from fulltilt.infer.artefact import Artefact, open_eager
from fulltilt.infer.generate.decoding import Sampling, Writer, find_writer
from fulltilt.infer.serve.service import Settings
from fulltilt.infer.serve.wire import STATUS, read_deadline_s
from fulltilt.records.words import WordTable

MAX_WAITING, MAX_NEW_TOKENS = 16, 4096


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

    async def enter(self, request: Request) -> AsyncGenerator[None, None]:
        """Count a request until its stream has ended, or raise HTTPException (429): too many wait."""
        if self.n_inside <= self.max_waiting:
            await request.body()  # who sends it slowly takes no place meanwhile
        if self.n_inside > self.max_waiting:
            raise HTTPException(429, f"{self.n_inside} requests wait already; come later", {"Retry-After": "1"})
        self.n_inside += 1
        try:
            yield
        finally:
            self.n_inside -= 1

    async def stream(
        self, prompt: Sequence[int], body: GenerateBody, deadline_s: float, note_status: Callable[[int], None]
    ) -> AsyncGenerator[str, None]:
        """Yield an event for each word, then a summary. Whoever stops listening stops the writing.

        Args:
            deadline_s: By the monotonic clock; what is not written by then is not sent.
            note_status: Told the status of a failure: it comes after that of the answer was sent.
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
            return await asyncio.wait_for(queue.get(), left_s)

        job = loop.run_in_executor(self._worker, work)
        job.add_done_callback(lambda job: (job.exception(), queue.put_nowait(None)))  # or it says that nobody asked
        times_s: list[float] = []
        try:
            while (word := await read_word()) is not None:
                times_s.append(time.perf_counter() - start_s)
                yield _encode({"token": word} | ({} if self._table is None else {"text": self._table.decode([word])}))
            await job
            if len(times_s) < body.max_new_tokens:  # ``is_over`` ended it before the queue's timer did
                raise TimeoutError
            yield _encode({"done": True, "n_tokens": len(times_s), "first_token_s": times_s[0], "seconds": times_s[-1]})
        except Exception as error:  # the answer has begun: what went wrong is its last event
            is_late = isinstance(error, TimeoutError)
            note_status(504 if is_late else 500)
            late = f"the deadline passed after {len(times_s)} words; ask for fewer, or give it more time"
            yield _encode({"error": late if is_late else describe_error(error)})
        finally:
            is_gone = True


def _encode(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def open_text_service(artefact: Artefact, table: WordTable | None) -> TextService:
    """Open the service of an artefact whose model writes text.

    Another engine than eager has no cache of words: the model is loaded anew then, and writes in eager fp32.
    """
    is_own = artefact.plan["engine"] == "eager"
    runner: Any = (artefact if is_own else open_eager(artefact.folder, artefact.manifest)).run
    writer = find_writer(runner.forward)
    assert writer is not None, "as when it was built"
    return TextService(writer, table)


def build_router(service: TextService, settings: Settings) -> APIRouter:
    """Build the route; the application that includes it checks who asks and how long a body is."""
    router = APIRouter()

    @router.post("/v1/generate", dependencies=[Depends(service.enter)])
    async def generate(request: Request) -> StreamingResponse:
        deadline_s = read_deadline_s(request, settings.deadline_s)
        try:  # of whatever type it says it is: curl -d calls it a form
            body = GenerateBody.model_validate_json(await request.body())
            prompt = service.read_prompt(body)
        except ValidationError as error:
            raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in error.errors()]) from None
        except UsageError as error:
            raise HTTPException(422, str(error)) from None
        note_status = functools.partial(request.scope.__setitem__, STATUS)
        return StreamingResponse(service.stream(prompt, body, deadline_s, note_status), media_type="text/event-stream")

    return router
