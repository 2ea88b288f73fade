"""The file with a server's addresses: readers see the whole file or none."""

import json
import os
from pathlib import Path

import pytest

from gpubridge.errors import BridgeError
from gpubridge.lifecycle import clear_ports_file, ports_file

ADDRESSES = {"http": ("127.0.0.1", 8000)}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A ports file that is whole, if it is there, whenever a name in its folder has changed."""
    path = tmp_path / "ports.json"

    def watched(change):
        def changed(self, *args, **kwargs):
            result = change(self, *args, **kwargs)
            if path.exists():
                assert json.loads(path.read_text())["pid"]
            return result

        return changed

    for name in ("write_text", "touch", "replace", "unlink"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    return path


def test_it_is_there_as_long_as_the_server(path):
    clear_ports_file(path)
    assert not path.exists()
    with ports_file(path, ADDRESSES):
        http = {"address": "127.0.0.1", "port": 8000}
        assert json.loads(path.read_text()) == {"pid": os.getpid(), "http": http}
    assert list(path.parent.iterdir()) == []


def test_that_of_a_server_that_has_ended_is_removed(path):
    no_process = 1 << 22
    with path.open("w") as file:
        json.dump({"pid": no_process + 1}, file)
    clear_ports_file(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["absent/ports.json", "folder"])
def test_where_it_cannot_be_written_that_is_said_at_once(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(BridgeError, match="--ports-file cannot be written: "):
        clear_ports_file(tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
