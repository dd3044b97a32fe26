"""Load a server over HTTP from a process of its own, and stop when the responses decide."""

import contextlib
import dataclasses
import fcntl
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import SplitResult, urlsplit
from urllib.request import Request, urlopen

import numpy as np

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.load.arrivals import cut_prompt
from fulltilt.infer.load.outcome import N_COLUMNS, LoadOutcome, LoadPlan, Responses, build_outcome, judge_responses

MAX_RATE_PER_S = 10_000.0  # one process sends no more
MAX_REQUESTS = 2_000_000
LOOK_GROWTH = 1.02  # a look costs more than the responses that came since, if they are few
PATIENCE_S = 10.0
BUSY, MOST_SAID, MOST_BYTES = (429, 503, 504), 300, 2**28


class HttpLoad:
    """One load on one server. What was measured stays in it, however it ended.

    Args:
        bodies: JSON texts of the requests, sent in turn.
        token: Sent as ``Authorization: Bearer``.

    Raises:
        UsageError: the URL or the rate cannot be used.
    """

    def __init__(self, plan: LoadPlan, bodies: Sequence[str], *, token: str | None = None):
        self.plan, self.ended = plan, "the sending process died"
        self._request = build_request(plan, bodies, token)
        self._rows, self._open = [np.empty(0)], np.empty(0)
        self._n_rows = self._n_looked = 0

    def run(self, *, on_look: Callable[[float, int], None] = lambda now_s, n_answers: None) -> LoadOutcome:
        """Send until the schedule is over, the test has decided or the server is gone.

        Args:
            on_look: Called now and then with the seconds passed and the answers so far.

        Raises:
            FulltiltError: no request ended.
        """
        command = [sys.executable, "-m", "fulltilt.infer.load.sender"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 2**20)  # so that a look here never delays a request there
            try:
                print(json.dumps(self._request), file=process.stdin, flush=True)
                for line in process.stdout:
                    now_s = self._take(line)
                    on_look(now_s, self._n_rows)
                    if now_s >= self.plan.min_s and self._is_decided():
                        self.ended = "decided"
                        break
            except BaseException:
                self.ended = "interrupted"
                raise
            finally:
                process.kill()
        return self.build_outcome()

    def select(self) -> Responses:
        """Select the responses up to the first request that may still be in time."""
        return Responses(np.concatenate([*self._rows, self._open]), self.plan.limit_s)

    def build_outcome(self) -> LoadOutcome:
        responses = self.select()
        if not len(responses):
            raise FulltiltError(f"no request to {self.plan.url} ended ({self.ended}); see whether the server answers")
        return build_outcome(responses, self.plan, self.ended)

    def _take(self, line: str) -> float:
        message = json.loads(line)
        rows, self._open = (np.frombuffer(bytes.fromhex(message[name])) for name in ("rows", "open"))
        self._rows.append(rows)
        self._n_rows += len(rows) // N_COLUMNS
        self.ended = message["ended"] or self.ended
        return message["now_s"]

    def _is_decided(self) -> bool:
        """Look at the responses so far; seldom enough that looking costs little."""
        if self.plan.limit_s is None or self._n_rows < LOOK_GROWTH * self._n_looked:
            return False
        self._n_looked = self._n_rows
        responses = self.select()
        return len(responses) > 0 and judge_responses(responses, self.plan)[0] != "not proven"


def build_request(plan: LoadPlan, bodies: Sequence[str], token: str | None) -> dict[str, Any]:
    """Build what the sending process is told."""
    parts, rate_per_s = split_url(plan.target), plan.requests_per_s
    if plan.scenario == "server" and not (rate_per_s and 0 < rate_per_s <= MAX_RATE_PER_S):
        raise UsageError(f"requests_per_s {rate_per_s:g} has to be above 0; one process sends at most 10,000 a second")
    n_requests = round((rate_per_s or 0.0) * plan.seconds) if plan.scenario == "server" else MAX_REQUESTS
    if not 1 <= n_requests <= MAX_REQUESTS:
        raise UsageError(f"{n_requests:,} requests are not 1 to {MAX_REQUESTS:,}; give fewer seconds or more")
    path = parts._replace(scheme="", netloc="", fragment="").geturl()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    return {
        **dataclasses.asdict(plan),
        "host": parts.hostname,
        "port": parts.port or (443 if parts.scheme == "https" else 80),
        "is_tls": parts.scheme == "https",
        "requests": [f"{head}Content-Length: {len(body)}\r\n\r\n{body}" for body in bodies],
        "n_requests": n_requests,
    }


def split_url(url: str) -> SplitResult:
    """Split the URL of a server, or raise a UsageError where it is none."""
    with contextlib.suppress(ValueError):  # of a port, or an address
        parts, is_plain = urlsplit(url), url.isascii() and " " not in url
        if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise UsageError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8000")


def build_bodies(samples: Sequence[Any], samples_per_request: int) -> list[str]:
    """Build the requests: each sample is the first of one of them."""
    n = len(samples)
    return [json.dumps({"inputs": [samples[(i + k) % n] for k in range(samples_per_request)]}) for i in range(n)]


def build_prompts(samples: Sequence[Any], n_new: int, *, seed: int) -> list[str]:
    """Build requests for words behind the beginning of each sample's first input, or raise UsageError."""
    texts = [sample[0] if isinstance(sample[0], list) else sample for sample in samples]
    draws, room = random.Random(seed), max(map(len, texts)) - n_new
    if room < 1:
        raise UsageError(f"{n_new} new words leave none for a prompt: texts have {room + n_new} here; ask for fewer")
    prompts = [cut_prompt(words, draws)[:room] for words in texts]
    return [json.dumps({"tokens": words, "max_new_tokens": n_new}) for words in prompts]


def fetch(url: str, *, token: str | None = None, body: str | None = None, patience_s: float = PATIENCE_S) -> Any:
    """Fetch a JSON document from a server, or its answer to ``body``; of server-sent events the text.

    Raises:
        UsageError: nobody answers there, or with something else; a server that only has too much to do is none.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        request = Request(split_url(url).geturl(), headers=headers, data=None if body is None else body.encode())
        with urlopen(request, timeout=patience_s) as answer:
            text = answer.read(MOST_BYTES)
            if answer.headers.get_content_type() == "text/event-stream":
                return text.decode()
    except HTTPError as error:
        with error:
            said = f"{error.reason} ({error.read(MOST_SAID).decode(errors='replace')})"
        if body is not None and error.code in BUSY:
            return None
        raise UsageError(f"{url} answers {error.code} {' '.join(said.split())}") from None
    except OSError as error:
        raise UsageError(f"nobody answers at {url} ({getattr(error, 'reason', error)})") from None
    except HTTPException as error:
        raise UsageError(f"{url} answers with something that is no HTTP ({error!r})") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{url} answers with something that is no JSON") from None
