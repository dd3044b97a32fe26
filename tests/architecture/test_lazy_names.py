"""Names that load on first use: the same as if they had been imported, and none that is not there."""

import contextlib
import importlib
import subprocess
import sys

import pytest

from fulltilt.errors import UsageError

ROOMS = ["config", "engine", "integrations", "measure", "tuner"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_it_says_and_nothing_else(room):
    module = importlib.import_module(f"fulltilt.{room}")
    for name in dir(module):
        with contextlib.suppress(UsageError):  # the other library of an integration may be missing
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"'fulltilt.{room}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_asking_loads_and_importing_the_room_does_not():
    code = (
        "import sys, fulltilt.config as room; before = 'fulltilt.config.model' in sys.modules; room.Config; "
        "print(before, 'fulltilt.config.model' in sys.modules, 'Config' in vars(room))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
