"""What tests with servers have in common."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models of a file's tests."""
    return tmp_path_factory.mktemp("models")
