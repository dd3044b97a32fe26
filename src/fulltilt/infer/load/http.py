"""Load a server over HTTP from a process of its own, and stop when the responses decide."""

import contextlib
import dataclasses
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.infer.load.estimates import Floats
from fulltilt.infer.load.outcome import N_COLUMNS, LoadOutcome, LoadPlan, Responses, build_outcome, judge_responses

MAX_RATE_PER_S = 10_000.0  # one process sends no more
MAX_REQUESTS = 2_000_000
LOOK_GROWTH = 1.02  # a look costs more than the responses that came since, if they are few
PATIENCE_S = 10.0
PREDICT = "/v1/predict"
BUSY, MOST_SAID = (429, 503, 504), 300


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
        self._parts: list[Floats] = []
        self._n_rows = 0
        self._known_until_s = 0.0
        self._n_looked = 0

    def run(self, *, on_look: Callable[[float, "HttpLoad"], None] | None = None) -> LoadOutcome:
        """Send until the schedule is over, the test has decided or the server is gone.

        Args:
            on_look: Called now and then with the seconds passed.

        Raises:
            FulltiltError: no request ended.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "fulltilt.infer.load.sender"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        assert process.stdin is not None
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 2**20)  # so that a look here never delays a request there
        is_told = False
        try:
            process.stdin.write(json.dumps(self._request) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                self._take(message)
                if not is_told and on_look is not None and "now_s" in message:
                    on_look(message["now_s"], self)
                if not is_told and self._is_decided():
                    is_told = True
                    process.stdin.close()
        finally:
            self._end(process)
        if is_told and self.ended == "stopped":
            self.ended = "decided"
        return self.build_outcome()

    def select(self) -> Responses:
        """Select the responses up to the first request of which nothing is known yet."""
        return Responses.cut(np.concatenate([np.empty((0, N_COLUMNS)), *self._parts]), self.plan, self._known_until_s)

    def describe(self) -> str:
        """Say how many responses there are, and how the latest of them were."""
        latest = self._parts[-1] if self._parts else np.zeros((1, N_COLUMNS))
        slowest_ms = 1000 * float((latest[:, 2] - latest[:, 0]).max())
        return f"{self._n_rows:,} answers, the slowest of the latest in {slowest_ms:.3g} ms"

    def build_outcome(self) -> LoadOutcome:
        responses = self.select()
        if not len(responses):
            raise FulltiltError(f"no request to {self.plan.url} ended; see whether the server answers, and try again")
        return build_outcome(responses, self.plan, self.ended)

    def _take(self, message: dict[str, Any]) -> None:
        if rows := message.get("rows"):
            self._parts.append(np.frombuffer(bytes.fromhex(rows)).reshape(-1, N_COLUMNS))
            self._n_rows += len(self._parts[-1])
        self._known_until_s = message.get("known_until_s", self._known_until_s)
        self.ended = message.get("ended", self.ended)

    def _is_decided(self) -> bool:
        """Look at the responses so far; seldom enough that looking costs little."""
        is_due = self._n_rows >= LOOK_GROWTH * self._n_looked and self._known_until_s >= self.plan.min_s
        if self.plan.limit_s is None or not is_due:
            return False
        self._n_looked = self._n_rows
        responses = self.select()
        return len(responses) > 0 and judge_responses(responses, self.plan)[0] != "not proven"

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Let the sender say its last words, and end it where it does not."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # half a line, where an interruption came between
                    self._take(json.loads(line))
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def build_request(plan: LoadPlan, bodies: Sequence[str], token: str | None) -> dict[str, Any]:
    """Build what the sending process is told."""
    parts = urlsplit(plan.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{plan.url} is no URL of a server; give one such as http://127.0.0.1:8000")
    rate_per_s = plan.requests_per_s
    if plan.scenario == "server" and not (rate_per_s and 0 < rate_per_s <= MAX_RATE_PER_S):
        raise UsageError(
            f"requests_per_s {rate_per_s:g} has to be above 0, and one process sends at most 10,000 a second"
        )
    n_requests = max(1, round((rate_per_s or 0.0) * plan.seconds)) if plan.scenario == "server" else MAX_REQUESTS
    if n_requests > MAX_REQUESTS:
        raise UsageError(f"{n_requests:,} requests are more than {MAX_REQUESTS:,}; give fewer seconds")
    path = _choose_path(plan.url) or parts.path
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    return {
        "host": parts.hostname,
        "port": parts.port or (443 if parts.scheme == "https" else 80),
        "is_tls": parts.scheme == "https",
        "head": head,
        "bodies": list(bodies),
        "n_requests": n_requests,
        **{key: value for key, value in dataclasses.asdict(plan).items() if key not in ("url", "limit_s")},
    }


def build_bodies(samples: Sequence[Any], samples_per_request: int) -> list[str]:
    """Build the requests: each sample is the first of one of them."""
    n = len(samples)
    return [
        json.dumps({"inputs": [samples[(first + i) % n] for i in range(samples_per_request)]}) for first in range(n)
    ]


def fetch(url: str, path: str, *, token: str | None = None, body: str | None = None) -> Any:
    """Fetch a JSON document from a server, or its answer to ``body``.

    Raises:
        UsageError: nobody answers there, or with something else; a server that only has too much to do is none.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = Request(url.rstrip("/") + path, headers=headers, data=None if body is None else body.encode())
    try:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        with error:
            said = error.read(MOST_SAID).decode(errors="replace")
        if body is not None and error.code in BUSY:
            return None
        raise UsageError(f"{url} answers {error.code} {error.reason} to {path or 'a request'} ({said})") from None
    except (URLError, OSError) as error:
        raise UsageError(f"nobody answers at {url} ({getattr(error, 'reason', error)})") from None
    except ValueError:
        raise UsageError(f"{url} answers {path or 'a request'} with something that is no JSON") from None


def probe(url: str, body: str, *, token: str | None = None) -> None:
    """Send one request, so that what can never be answered is told before the load.

    Raises:
        UsageError: as ``fetch``.
    """
    fetch(url, _choose_path(url), token=token, body=body)


def _choose_path(url: str) -> str:
    """Return what is behind a URL that has no path of its own."""
    return "" if urlsplit(url).path not in ("", "/") else PREDICT
