from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded_epyc_2_cores"


@pytest.fixture
def recorded() -> Path:
    """Files of a real machine; its README says how they were recorded."""
    return RECORDED


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Writes a synthetic tree of kernel files and returns its root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write
