"""Regions that /dev/shm has no memory for: their requests fail, and later ones do not."""

import os
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory as shm

from tests.commands import run_command
from tests.process.client_memory import ECHO, FINAL, SHM, infer, memory, model
from tests.process.server import running_server, write_model

SMALL = "GPUBRIDGE_TEST_SMALL_SHM"
MIB = 1 << 20
COUNT = 1 << 18
# A mount namespace of its own, whose /dev/shm has 3 MiB.
RUN = f'mount -t tmpfs -o size={3 * MIB} none /dev/shm && exec "$@"'


def test_a_full_shm_fails_requests_while_it_is_full(tmp_path):
    own = ["unshare", "--mount", "--map-root-user", "sh", "-c", RUN, "sh"]
    try:
        subprocess.run([*own, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mount namespaces cannot be made here")
    inner = f"{__file__}::test_within_a_small_shm"
    ran = run_command(
        [*own, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner],
        env={**os.environ, SMALL: "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


@pytest.mark.skipif(SMALL not in os.environ, reason="runs where /dev/shm is small")
@pytest.mark.parametrize("answer", [ECHO, FINAL])
def test_within_a_small_shm(tmp_path, answer):
    write_model(tmp_path, "m", model(answer))
    values = np.arange(COUNT, dtype=np.float32)
    with (
        running_server(tmp_path, "--allow-client-shm=true") as server,
        memory(MIB) as (key_in, given),
        memory(MIB) as (key_out, got),
        tritonclient.http.InferenceServerClient(server.http_url) as client,
    ):
        stubs = server.stubs()
        client.register_system_shared_memory("1", key_in, MIB)
        client.register_system_shared_memory("0", key_out, MIB)
        shm.set_shared_memory_region(given, [values])
        # What the client has there itself, before and behind what there is no memory for.
        shm.set_shared_memory_region(got, [np.full(1024, 7, np.float32)])
        shm.set_shared_memory_region(got, [np.full(1024, 8, np.float32)], offset=MIB - 4096)
        full = SHM / "full"
        for _ in range(2):
            with full.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            with pytest.raises(
                InferenceServerException, match="no memory is left in /dev/shm"
            ) as caught:
                infer(tritonclient.http, client, "m", COUNT)
            assert caught.value.status() == "503"
            # Pages that are there are the client's still.
            written = shm.get_contents_as_numpy(got, np.float32, [COUNT])
            assert written[0] in (0, 1)
            assert written[-1] in (COUNT - 1, COUNT)
            full.unlink()
            # Without being registered anew.
            infer(tritonclient.http, client, "m", COUNT)
            written = shm.get_contents_as_numpy(got, np.float32, [COUNT])
            assert np.array_equal(written, values + (answer is FINAL))
            os.truncate(SHM / key_out[1:], 4096)
            os.truncate(SHM / key_out[1:], MIB)
            shm.set_shared_memory_region(got, [np.full(1024, 8, np.float32)], offset=MIB - 4096)
        assert len(client.get_system_shared_memory_status()) == 2
        assert server.stubs() == stubs
