"""Sanitizers run every test whose file reaches compiled code, or its exemption says why not."""

from pathlib import Path

from tests import plane

ROOT = Path(__file__).parents[2]


def test_a_file_that_reaches_the_module_through_others_is_found(tmp_path):
    for name, text in {
        "gpubridge/dataplane.py": "",
        "gpubridge/errors.py": "",
        "gpubridge/tensor/dlpack.py": "def f():\n    from gpubridge import dataplane\n",
        "tests/unit/helper.py": "from gpubridge.tensor import dlpack\n",
        "tests/unit/test_late.py": "def test_x():\n    from tests.unit.helper import dlpack\n",
        "tests/unit/test_native.py": "import gpubridge._native\n",
        "tests/unit/test_errors.py": "import gpubridge.errors\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = {path.name for path in plane.reaching(tmp_path)}
    assert found == {"dlpack.py", "helper.py", "test_late.py", "test_native.py"}


def test_sanitizers_run_the_files_that_use_the_module():
    unit = ROOT / "tests" / "unit"
    for name in (
        *("busy_poll", "contexts", "device_tensor", "framework_arena", "long_forms"),
        *("long_messages", "long_strings", "many_tensors", "output_aliasing", "send_turn"),
        *("http_connection", "scheduling_batches", "stub_loop", "tensor_dlpack"),
    ):
        assert plane.is_plane(unit / f"test_{name}.py"), name
    assert plane.is_plane(ROOT / "tests" / "fuzz" / "test_http.py")
    assert not plane.is_plane(ROOT / "tests" / "process" / "test_bls.py")
    assert not plane.is_plane(unit / "test_restart_of_another_world.py")


def test_each_exemption_is_of_a_test_that_would_be_run_and_says_why():
    for name in plane.EXEMPT:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / "unit" / file
        assert path in plane.reaching(ROOT), name
        assert f"def {test}" in path.read_text(), name
    assert all(plane.EXEMPT.values())
