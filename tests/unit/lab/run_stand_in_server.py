"""``fulltilt lab serve`` with the stand-in for the training: run_stand_in_server.py LAB TTL_S N_DEVICES"""

import sys
import time
from pathlib import Path

from fulltilt.engine.interrupt import catch_signals
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import open_lab, serve
from fulltilt.records.run_folder import hold_folder

TRAIN = [sys.executable, "-S", str(Path(__file__).with_name("stand_in_train.py"))]

folder, ttl_s, n_devices = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
executor = LocalExecutor(list(range(n_devices)), logs=folder / "runners", is_lasting=True)
with (
    hold_folder(folder),
    open_lab(folder, create=True, term=Term(ttl_s=ttl_s, grace_s=0.1 * ttl_s)) as lab,
    serve(lab, [executor], command=TRAIN),
    catch_signals() as stop,
):
    while not stop:
        time.sleep(0.1)
