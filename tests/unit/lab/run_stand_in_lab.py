"""``fulltilt lab submit --local`` with the stand-in for the training: run_stand_in_lab.py CONFIG LAB"""

import sys
from pathlib import Path

from fulltilt.engine.interrupt import catch_signals
from fulltilt.lab.local import LocalExecutor, build_slots
from fulltilt.lab.points import read_grid
from fulltilt.lab.running import STOP_SIGNALS, recover, run_queue
from fulltilt.lab.store import open_store
from fulltilt.records.run_folder import hold_folder

config, lab = sys.argv[1], Path(sys.argv[2])
grid = read_grid(config, [])
with hold_folder(lab):
    store = open_store(lab, create=True)
    executor = LocalExecutor(
        lab, build_slots(grid.pool), [sys.executable, "-S", str(Path(__file__).with_name("stand_in_train.py"))]
    )
    recover(lab, store, executor)
    store.add(grid.source, grid.points, [])
    with catch_signals(STOP_SIGNALS, is_patient=True) as stop:
        run_queue(lab, store, executor, stop=stop, tell=lambda: None)
    store.close()
stop.deliver()
