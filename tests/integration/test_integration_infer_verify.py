"""``fulltilt infer verify`` as a user runs it, on a classifier of handwritten digits, with a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.config import inference_plan_of, load_config
from fulltilt.infer.artefact import build_artefact
from fulltilt.infer.model import build_inference_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def verify(*words, cwd):
    command = [sys.executable, "-m", "fulltilt", "infer", "verify", *words]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.slow
def test_an_artefact_of_digits_holds_until_a_file_changes(tmp_path):
    config = load_config(ROOT / "configs" / "targets.yaml")
    model = build_inference_model(config, device="cpu", n_samples=32)
    build_artefact(model, inference_plan_of(config), tmp_path / "digits", name="digits")
    done = verify("digits", "--json", "v.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "digits holds here."
    document = json.loads((tmp_path / "v.json").read_text())
    assert [check["name"] for check in document["checks"]] == ["files", "opens", "answers"]
    (tmp_path / "digits" / "weights.pt").write_bytes(b"torn")
    done = verify("digits", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.splitlines()[0] == "digits does not hold here: files."
    assert "weights.pt is not the file that was built" in done.stdout
    assert verify("nothing", cwd=tmp_path).returncode == 2
