"""``fulltilt check``: what a memory limit does to its exit code."""

import json
from pathlib import Path

import pytest

from fulltilt.cli import main

DIGITS = Path(__file__).parents[3] / "configs" / "digits.yaml"


@pytest.mark.parametrize(("limit", "verdict", "code"), [("64GiB", "ok", 0), ("100KiB", "problem", 3)])
def test_a_step_that_does_not_fit_the_memory_limit_ends_with_another_exit_code(tmp_path, limit, verdict, code):
    document = tmp_path / "check.json"
    words = ["check", str(DIGITS), "device=cpu", "--out", str(tmp_path / "runs"), "--json", str(document)]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--memory-limit", limit])
    assert ended.value.code == code
    items = {item["name"]: item for item in json.loads(document.read_text())["items"]}
    assert items["memory limit"]["verdict"] == verdict
