"""``fulltilt lab submit --local`` with the stand-in for the training: run_stand_in_lab.py CONFIG LAB [TTL_S]"""

import sys
import time
from pathlib import Path

from fulltilt.engine.interrupt import catch_signals
from fulltilt.lab.client import Client
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.points import read_grid
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import open_lab, serve
from fulltilt.records.run_folder import hold_folder

TRAIN = [sys.executable, "-S", str(Path(__file__).with_name("stand_in_train.py"))]

config, folder = Path(sys.argv[1]), Path(sys.argv[2])
ttl_s = float(sys.argv[3]) if len(sys.argv) > 3 else 600.0
executor = LocalExecutor(read_grid(str(config), []).pool, logs=folder / "runners")
with (
    hold_folder(folder),
    open_lab(folder, create=True, term=Term(ttl_s=ttl_s, grace_s=0.15 * ttl_s)) as lab,
    serve(lab, [executor], command=TRAIN) as (address, coordinator),
    catch_signals(is_patient=True) as stop,
):
    client = Client(None, address)
    client.submit(config, [])
    while not coordinator.is_idle():
        if stop and not coordinator.is_draining:
            coordinator.is_draining = True
            coordinator.end_all(is_urgent=False)
        time.sleep(0.02)
stop.deliver()
