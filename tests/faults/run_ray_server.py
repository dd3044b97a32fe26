"""``fulltilt lab serve --engine ray --devices none`` with leases of a few seconds: run_ray_server.py LAB TTL_S"""

import sys
import time
from pathlib import Path

from fulltilt.engine.interrupt import catch_signals
from fulltilt.lab.executors.ray import RayExecutor
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import open_lab, serve
from fulltilt.records.run_folder import hold_folder

folder, ttl_s = Path(sys.argv[1]), float(sys.argv[2])
executor = RayExecutor(folder, host="127.0.0.1")
with (
    hold_folder(folder),
    open_lab(folder, create=True, term=Term(ttl_s=ttl_s, grace_s=0.15 * ttl_s)) as lab,
    serve(lab, [executor]),
    catch_signals() as stop,
):
    while not stop:
        time.sleep(0.1)
    executor.end_head()
