"""The inputs of a batch go to the GPU while the one before it is executed."""

import numpy as np
import pytest

from tests.gpu.lane import LIBRARIES, needs_library, running_lane_server
from tests.gpu.models import write_patient
from tests.process.test_device_uploads import doubled, lined_up

COUNT = 250_000
NBYTES = 4 * COUNT


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_upload_is_done_before_the_batch_before_it_is(machine, tmp_path, library):
    """The model itself says what of the next input it has seen on the GPU's stream of uploads."""
    needs_library(library)
    write_patient(tmp_path, library, "patient")
    with running_lane_server(machine, tmp_path) as served:
        with (
            served.costing("patient", h2d=(4 * NBYTES, 4), d2h=(4 * NBYTES, 4), waits=(4, 4)),
            lined_up(served, "patient", COUNT) as (permits, answers, given),
        ):
            permits.give()
            permits.wait_for(2)
            permits.give_all()
            for answer, values in zip(answers, given, strict=True):
                assert answer.result() == doubled(values)
        # Of each execute: which upload was the last that was begun, and whether all were done.
        seen = (tmp_path / "patient" / "seen").read_text().split()
    # The one before there was anything to be seen; the first; the second, with the input of the third.
    assert seen == ["1:True", "2:True", "4:True", "4:True"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_many_at_once_are_right(machine, tmp_path, rng, library):
    needs_library(library)
    write_patient(tmp_path, library, "patient")
    values = [rng.random(COUNT // 10, np.float32) for _ in range(40)]
    with running_lane_server(machine, tmp_path) as served:
        from concurrent.futures import ThreadPoolExecutor

        assert served.infer("patient", values[0]) == doubled(values[0])
        nbytes = values[0].nbytes
        with (
            served.costing("patient", h2d=(40 * nbytes, 40), d2h=(40 * nbytes, 40), waits=(40, 40)),
            ThreadPoolExecutor(6) as pool,
        ):
            answers = list(pool.map(lambda each: served.infer("patient", each), values))
        assert answers == [doubled(each) for each in values]
