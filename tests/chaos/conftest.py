"""The chaos run takes minutes: it runs when it is asked for (``make chaos``), and prints what it saw."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "chaos" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("chaos")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def say(capfd):
    """Print past pytest's capture: whoever waits for minutes wants to see it move."""

    def print_now(text):
        with capfd.disabled():
            print(text, flush=True)

    return print_now
