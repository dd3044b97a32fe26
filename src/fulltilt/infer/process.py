"""Start the measuring process, listen to it and end it; ``main`` is its entry point."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import DeviceMemoryError, FulltiltError, UsageError
from fulltilt.hardware import read_oom_kills
from fulltilt.hardware.proctree import kill_session, set_death_signal
from fulltilt.records import Evidence, classify_outcome
from fulltilt.tuner.trials.client import open_log
from fulltilt.tuner.trials.trial import serve_request

BODY = "fulltilt.infer.measuring:run"
LOG_TAIL_CHARS = 65536  # an aborted process prints the stacks of all threads after its last words


def run_measuring(
    request: Mapping[str, Any],
    *,
    log_path: Path,
    on_progress: Callable[[int, int], None],
    environment: Mapping[str, str] | None = None,
    body: str = BODY,
    deadline_s: float | None = None,
) -> dict[str, Any]:
    """Run ``request`` in a process of its own and return what it measured. The process is gone when this returns.

    Args:
        environment: Variables that it has beside those of this process.
        body: ``module:function`` that takes (request, send) and ends with ``send({"measured": …})``.
        deadline_s: After so long it is ended, which is a failure.

    Raises:
        UsageError: the configuration cannot be measured.
        DeviceMemoryError: memory ran out.
        FulltiltError: the model failed, or the process died; says how, and where its log is.
        StorageError: the log cannot be written.
    """
    reply: dict[str, Any] = {}
    oom_kills = read_oom_kills() or 0
    with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch, open_log(log_path) as log:
        file = Path(scratch) / "request.json"
        file.write_text(json.dumps({**request, "parent_pid": os.getpid()}))
        answers, sender = os.pipe()
        with os.fdopen(answers) as lines:
            process = subprocess.Popen(
                [sys.executable, "-m", "fulltilt.infer.process", str(file), str(sender), scratch, body],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(sender,),
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            )
            deadline = threading.Timer(deadline_s or threading.TIMEOUT_MAX, kill_session, [process.pid])
            try:
                os.close(sender)
                deadline.start()
                for line in lines:
                    message = json.loads(line)
                    reply |= message
                    if "progress" in message:
                        on_progress(*message["progress"])
                exit_code = process.wait()
            finally:
                is_late = deadline_s is not None and not deadline.is_alive()
                deadline.cancel()
                kill_session(process.pid)
                process.wait()
    if "measured" in reply and exit_code == 0:
        return reply["measured"]
    if is_late:
        raise FulltiltError(f"no result after {deadline_s:.0f} s, so it was ended (log: {log_path})")
    raise build_error(reply.get("failure", {}), exit_code, log_path, (read_oom_kills() or 0) - oom_kills)


def build_error(failure: Mapping[str, str], exit_code: int, log_path: Path, n_oom_kills: int) -> FulltiltError:
    """Return the error, with its exit code, that says in one sentence why nothing was measured."""
    types = tuple(failure.get("exception_types", "").split())
    message = failure.get("message", "")
    if UsageError.__name__ in types:
        return UsageError(message)
    log = f"(log: {log_path})"
    if FulltiltError.__name__ in types and DeviceMemoryError.__name__ not in types:
        return FulltiltError(f"{message} {log}")
    evidence = Evidence(
        exit_code=exit_code,
        exception_type=failure.get("exception_type"),
        exception_types=types,
        message=message.partition("\n")[0],
        place=failure.get("place", ""),
        stderr_tail=log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:],
        host_oom_kills=n_oom_kills,
    )
    status, reason = classify_outcome(evidence)
    if status == "out_of_memory":
        return DeviceMemoryError(
            f"the model ran out of memory ({reason}); lower targets.samples_per_request, or use a smaller model {log}"
        )
    return FulltiltError(f"the model failed while it was measured ({reason}) {log}")


def main() -> int:
    """Run the request of a file. Arguments: the file, the file descriptor for answers, a scratch folder, the body."""
    set_death_signal(signal.SIGKILL)
    file, answers, scratch, body = sys.argv[1:]
    if (
        os.getppid() != json.loads(Path(file).read_text())["parent_pid"]
    ):  # the parent ended before the death signal was set
        return 1
    return serve_request(os.open(file, os.O_RDONLY), int(answers), scratch=scratch, body=body)


if __name__ == "__main__":
    sys.exit(main())
