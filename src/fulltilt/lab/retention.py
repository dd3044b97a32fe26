"""Remove what nobody needs any more: old experiments that are over, and files that nothing refers to."""

import contextlib
import logging
import shutil
import time
from collections.abc import Collection
from typing import Any

from fulltilt.lab.lab import LOCAL, RUNNER_LOGS, Lab, find_out_dir
from fulltilt.lab.server_log import tell
from fulltilt.lab.states import OVER
from fulltilt.lab.store import StaleAttemptError

MOST_AT_ONCE = 500  # in one answer of a server
SPARED_S = 86_400.0  # a file that nothing refers to yet may have been sent for what is submitted, or ends, next
logger = logging.getLogger(__name__)


def prune(lab: Lab, *, older_than_s: float, states: Collection[str] = OVER, is_dry_run: bool = False) -> dict[str, Any]:
    """Remove experiments that are over and have not changed for so long, with all their files.

    Returns:
        The ids of those that went, or would go; how many files of the depot went that nothing refers to; whether
        there is more to do: then call again.
    """
    limit = None if is_dry_run else MOST_AT_ONCE
    until_s = time.time() - older_than_s
    found = lab.store.read_experiments(states=states, unchanged_since_s=until_s, limit=limit)
    if is_dry_run:
        return {"ids": [each.id for each in found], "n_files": 0, "is_more": False}
    for each in found:
        with contextlib.suppress(StaleAttemptError):  # somebody tries it again just now
            lab.store.remove(each)
            for folder in (find_out_dir(lab.folder, each.id), lab.folder / LOCAL / each.id):
                shutil.rmtree(folder, ignore_errors=True)
            for number in range(1, each.attempt + 1):
                (lab.folder / RUNNER_LOGS / f"runner-{each.id}-{number}.txt").unlink(missing_ok=True)
            logger.info("%s is pruned", each.id, extra=tell("pruned", experiment=each.id, state=each.state))
    for folder in (lab.folder / "removed").glob("e*"):  # what somebody took off the list by hand
        if folder.stat().st_ctime < until_s:
            shutil.rmtree(folder, ignore_errors=True)
    is_more = len(found) == limit
    unused_s = time.time() - min(older_than_s, SPARED_S)
    n_files = 0 if is_more else lab.depot.remove_older(unused_s, spare=lab.store.read_digests())
    return {"ids": [each.id for each in found], "n_files": n_files, "is_more": is_more}
