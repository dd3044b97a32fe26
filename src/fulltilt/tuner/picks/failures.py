"""Say why no plan ran to its end, and what to do about it."""

import re
from collections import Counter
from collections.abc import Sequence

from fulltilt import errors
from fulltilt.errors import FulltiltError, find_remedy
from fulltilt.records import Trial

MEMORY_REMEDY = "try smaller batch sizes, or a larger --memory-limit"
_CLASS = re.compile(r"^(?:rank \d+: )?(?:\w+\.)*(\w+): ")
_QUOTED = "; last line on stderr: "  # a program's own words


def describe_failures(rows: Sequence[Trial]) -> str:
    """Say how the rows (one a plan) ended, skipped last: ``no plan can run: 3 out_of_memory. out_of_memory, t1: …``."""
    counts: dict[str, list[Trial]] = {}
    for row in sorted(rows, key=lambda row: row.status == "skipped"):
        counts.setdefault(row.status, []).append(row)
    if not counts:
        return "no plan can run: the search ran no trial; give it a larger --budget"
    parts = ", ".join(f"{len(found)} {status}" for status, found in counts.items())
    reasons = ". ".join(f"{status}, {found[0].id}: {found[0].reason}" for status, found in counts.items())
    remedy = f"; {MEMORY_REMEDY}" if "out_of_memory" in counts else ""
    return f"no plan can run: {parts}. {reasons}{remedy}"


def find_failure_remedy(rows: Sequence[Trial]) -> str | None:
    """Find what to do about the failure that most rows share, which may be to read the log of one of them."""
    failed = [row for row in rows if row.status != "skipped"] or rows  # a skipped value is not why the others failed
    remedies = [
        MEMORY_REMEDY if row.status == "out_of_memory" else _find_own_remedy(row.reason or "") for row in failed
    ]
    if not remedies:
        return None
    remedy = Counter(remedies).most_common(1)[0][0]
    return remedy or f"the log of {failed[remedies.index(None)].id} says more"


def _find_own_remedy(reason: str) -> str | None:
    """Read the remedy of a message of ours; what a library or a program says behind "; " need not be one."""
    if _QUOTED in reason:
        return None
    named = _CLASS.search(reason)
    kind = getattr(errors, named[1], None) if named else FulltiltError
    return find_remedy(reason) if isinstance(kind, type) and issubclass(kind, FulltiltError) else None
