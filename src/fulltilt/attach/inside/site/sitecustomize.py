"""Starts the observer in a foreign Python process, and hands over to the process' own sitecustomize."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_observer():
    folder = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        "_fulltilt_inside", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.start(os.environ["FULLTILT_ATTACH"])


def _run_own_sitecustomize():
    """Load the module that this file stands in front of, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
if "FULLTILT_ATTACH" in os.environ:
    try:
        _start_observer()
    except Exception as error:  # the script must run as if nobody watched
        sys.stderr.write(f"fulltilt doctor: this process is not watched: {type(error).__name__}: {error}\n")
_run_own_sitecustomize()
