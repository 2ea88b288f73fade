"""gpubridge doctor: what it says of this machine, and of machines that lack something."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpubridge import doctor
from gpubridge.cuda_ipc import DeviceProbe
from gpubridge.doctor import Finding
from gpubridge.doctor.environments import environment_findings
from gpubridge.engine.environments import stub_modules
from gpubridge.tensor import native
from tests.process.forked_commands import run_forked


def found(subject):
    (finding,) = [finding for finding in doctor.examine() if finding.subject == subject]
    return finding


def descriptors():
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_the_command_reports_and_says_that_models_can_be_served():
    finished = run_forked("doctor")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "works  shared memory (memfd):" in finished.stdout
    assert "works  uvloop: " in finished.stdout
    assert "GPUs: " in finished.stdout
    assert finished.stdout.endswith("models can be served here\n")


def test_every_finding_that_does_not_work_has_a_reason():
    findings = doctor.examine()
    assert len({finding.subject for finding in findings}) == len(findings)
    assert all(finding.detail for finding in findings)


def test_looking_leaves_nothing_open():
    before = descriptors()
    doctor.examine()
    assert descriptors() == before


def refuse(*_args, **_kwargs):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("function", "subject"),
    [
        ("os.memfd_create", "shared memory (memfd)"),
        ("socket.socketpair", "channel to stubs"),
        ("socket.send_fds", "channel to stubs"),
        ("os.pidfd_open", "supervision (pidfd)"),
    ],
)
def test_the_sandbox_rules_that_serving_needs_are_named(monkeypatch, function, subject):
    monkeypatch.setattr(function, refuse)
    findings = doctor.examine()
    (broken,) = [finding for finding in findings if finding.needed and not finding.works]
    assert broken.subject == subject
    assert broken.advice
    assert doctor.exit_code(findings) == 1
    assert doctor.report(findings).endswith(f"\ncannot serve: {subject}")


def test_a_platform_without_pidfd_is_no_crash(monkeypatch):
    monkeypatch.delattr("os.pidfd_open")
    assert found("supervision (pidfd)").works is False


def lack(monkeypatch, *packages):
    find = doctor.findings.importlib.util.find_spec
    found = lambda name: None if name in packages else find(name)  # noqa: E731
    monkeypatch.setattr(doctor.findings.importlib.util, "find_spec", found)


def test_a_missing_package_of_the_server_is_named_with_its_command(monkeypatch):
    lack(monkeypatch, "orjson")
    finding = found("orjson")
    assert (finding.works, finding.needed) == (False, True)
    assert finding.advice.startswith("pip install orjson")


def test_a_missing_framework_is_no_failure(monkeypatch):
    lack(monkeypatch, "torch", "cupy")
    findings = doctor.examine()
    assert [f.works for f in findings if f.subject in ("torch", "cupy")] == [False, False]
    assert doctor.exit_code(findings) == 0


def test_without_gpus_the_probes_reason_is_told(monkeypatch):
    probe = DeviceProbe(0, "no CUDA driver: it is gone")
    monkeypatch.setattr(doctor.findings, "probe_devices", lambda: probe)
    finding = found("GPUs")
    assert (finding.works, finding.detail) == (False, "no CUDA driver: it is gone")
    assert "--gpu-fallback=host" in finding.advice
    assert not finding.needed


@pytest.mark.parametrize(
    ("installed", "works", "detail"),
    [
        (["NVIDIA_nvJPEG", "nvidia-nvjpeg2k"], True, "nvidia-nvjpeg 13.3"),
        (["nvidia-nvjpeg-cu12"], True, "nvidia-nvjpeg-cu12 13.3"),
        (["pillow", "nvidia-nvjpeg2k-cu13"], False, "not installed"),
    ],
)
def test_the_jpeg_library_is_known_by_its_distributions(monkeypatch, installed, works, detail):
    present = [SimpleNamespace(name=name, version="13.3") for name in installed]
    monkeypatch.setattr(doctor.findings.importlib.metadata, "distributions", lambda: present)
    monkeypatch.setattr(doctor.findings, "_installed", lambda *_: None)
    finding = found("nvidia-nvjpeg")
    assert (finding.works, finding.detail) == (works, detail)
    assert ("[image-gpu]" in finding.advice) is ("[image-gpu-cu12]" in finding.advice) is not works


CU12 = [("nvidia_nvimgcodec_cu12", "0.9"), ("nvidia-cuda-nvrtc-cu12", "12.9.86")]
CU13 = [("nvidia-nvimgcodec-cu13", "0.9"), ("nvidia-cuda-nvrtc", "13.5.37")]


@pytest.mark.parametrize(
    ("driver", "installed", "works", "advice"),
    [
        ("13.0", CU13, True, ""),
        ("13.0", CU12, True, ""),
        ("12.2", CU12, True, ""),
        (
            "12.4",
            CU13,
            False,
            "pip install 'gpubridge[image-gpu-cu12]', or update the NVIDIA driver to R580",
        ),
        ("12.4", CU12 + CU13, False, "the driver knows 12.4: uninstall it"),
        ("12.4", [], False, "pip install 'gpubridge[image-gpu-cu12]', "),
        ("13.0", [], False, "pip install 'gpubridge[image-gpu]', "),
    ],
)
def test_packages_for_a_newer_driver_come_with_those_that_fit(
    monkeypatch, driver, installed, works, advice
):
    present = [SimpleNamespace(name=name, version=version) for name, version in installed]
    monkeypatch.setattr(doctor.findings.importlib.metadata, "distributions", lambda: present)
    monkeypatch.setattr("gpubridge.cuda_ipc.devices.driver_release", lambda: driver)
    monkeypatch.setattr(doctor.findings, "_installed", lambda *_: None)
    for subject in ("nvidia-nvimgcodec", "nvidia-cuda-nvrtc"):
        finding = found(subject)
        assert finding.works is works
        assert advice in finding.advice


def test_missing_bindings_come_with_a_command(monkeypatch):
    def absent(name):
        raise doctor.findings.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.findings.importlib.metadata, "version", absent)
    monkeypatch.setattr(doctor.findings, "_installed", lambda *_: None)
    assert found("cuda-python").advice == "for a GPU: pip install 'gpubridge[gpu]'"


def test_a_low_limit_comes_with_a_command(monkeypatch):
    monkeypatch.setattr(doctor.findings.resource, "getrlimit", lambda which: (64, 64))
    assert found("descriptors").works is False
    assert "ulimit -n" in found("descriptors").advice


def test_the_report_has_a_line_for_the_reason_and_one_for_the_advice():
    text = doctor.report(
        [
            Finding("extra", works=False, detail="not installed", advice="install it"),
            Finding("base", works=True, detail="1.0", needed=True),
        ]
    )
    lines = text.splitlines()
    assert lines[2:] == [
        "needed to serve",
        "  works  base: 1.0",
        "",
        "faster, or on a GPU, or for models",
        "  no     extra: not installed",
        "         -> install it",
        "",
        "models can be served here",
    ]


def test_an_environment_s_compiled_module_is_told_or_why_there_is_none(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    (found,) = environment_findings([tmp_path])
    assert found.works
    assert found.detail.endswith(f"compiled module {native.native_path()}")
    # Another interpreter's: to be built, or not.
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/module.cpp").touch()
    monkeypatch.setattr(stub_modules, "_source", lambda: tmp_path)
    monkeypatch.setattr(stub_modules, "_candidates", lambda *_: [])
    for compiler, said in (
        (["g++"], "to be built with g++ when"),
        (None, "slower: no module for "),
    ):
        monkeypatch.setattr(stub_modules, "compiler_command", lambda chosen=compiler: chosen)
        (found,) = environment_findings([tmp_path])
        assert said in found.detail
        assert found.works == (compiler is not None)
    (missing,) = environment_findings([tmp_path / "none"])
    assert "holds no bin/python3" in missing.detail
