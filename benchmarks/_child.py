"""Call a function in a process of its own: ``python -m benchmarks._child MODULE:FUNCTION ARGUMENTS``, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks._runner import ROOT


def call_in_process(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Any:
    """Return what ``module:function(**arguments)`` returns in a new process.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    command = [sys.executable, "-m", __name__, function, json.dumps(arguments)]
    given = os.environ | (environment or {})
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{function}, {arguments}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
