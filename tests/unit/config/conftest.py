import pytest


@pytest.fixture
def write(tmp_path):
    """Write a configuration and return its place."""

    def write_file(text: str | bytes, name: str = "config.yaml"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write_file
