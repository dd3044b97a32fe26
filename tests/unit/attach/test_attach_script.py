"""Small scripts under the observer, each in a process of its own, and what is read of them."""

import json
import os
import subprocess
import sys

import pytest

from fulltilt.attach.launch import SITE
from fulltilt.doctor.observation import read_observation

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step(optimizer=optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def observe(tmp_path):
    """Run a script under the observer → what was seen of it, and what it printed."""

    def observe(script, *, proves=False, code=0):
        (tmp_path / "seen").mkdir()
        (tmp_path / "train.py").write_text(script)
        session = json.dumps({"folder": str(tmp_path / "seen"), "proves": proves})
        environment = {**os.environ, "PYTHONPATH": str(SITE), "FULLTILT_ATTACH": session}
        words = [sys.executable, "-W", "ignore", "train.py"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "fulltilt" not in done.stderr, done.stderr
        return read_observation(tmp_path / "seen"), done.stdout

    return observe


def test_torch_that_is_looked_for_before_it_is_imported_is_watched(observe):
    """As ``datasets`` and ``transformers`` do."""
    found, _ = observe(f"""
import importlib.util
for _ in range(2):
    assert importlib.util.find_spec("torch") is not None
{TRAIN}
for _ in range(30):
    step()
""")
    assert found.n_steps == 30
