"""What a trial process makes of errors before it answers."""

import pytest

from fulltilt.errors import WorkerDiedError
from fulltilt.tuner.trials import measuring


def test_a_dead_data_worker_is_explained_wherever_torch_tells_of_it():
    """torch raises from its signal handler, at times outside the loader: the row then held torch's words."""
    with (
        pytest.raises(WorkerDiedError, match=r"data worker \(pid 7\) died: killed by SIGKILL"),
        measuring.explain_workers(),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="boom"), measuring.explain_workers():
        raise RuntimeError("boom")
