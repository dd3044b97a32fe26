"""Find the user's own code in a call stack, as opposed to libraries and the observer."""

from __future__ import annotations

import os
import sys
import sysconfig

MAX_FRAMES = 40

_LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_known = {}  # by the file name of code objects


def is_user_file(filename):
    found = _known.get(filename)
    if found is None:
        path = os.path.realpath(filename)
        is_library = path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path
        found = _known[filename] = not (filename.startswith("<") or is_library)
    return found


def find_user_frame(depth):
    """Return the innermost frame of user code, ``depth`` or more calls up; None: there is none."""
    try:
        frame = sys._getframe(depth + 1)
    except ValueError:
        return None
    for _ in range(MAX_FRAMES):
        if frame is None or is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None
