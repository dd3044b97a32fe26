"""Compare what has to be the same on all machines of a lab."""

import functools
import platform
from collections.abc import Collection, Mapping

from fulltilt._version import __version__
from fulltilt.hardware.devices import read_package_version

OF_TRAININGS = ("fulltilt", "python", "torch")


@functools.cache  # what runs here stays what it is, whatever is installed meanwhile
def read_versions() -> Mapping[str, str]:
    """Return the versions of this process. What is not installed is left out."""
    found = {"fulltilt": __version__, "python": platform.python_version()}
    found |= {name: read_package_version(name) or "" for name in ("torch", "ray")}
    return {name: version for name, version in found.items() if version}


def explain_difference(versions: Mapping[str, str], node: str, names: Collection[str] | None = None) -> str | None:
    """Say which versions of a node are not those of the server, with both values; None: they are the same."""
    differing = [
        f"{name} {versions.get(name, 'missing')} on {node} and {version} on the server"
        for name, version in read_versions().items()
        if versions.get(name) != version and (names is None or name in names)
    ]
    return ", ".join(differing) or None
