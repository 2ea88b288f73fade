"""The commands of the command line: help, usage, what they write."""

import os
import select
import shlex
import shutil
import subprocess
import sys

import pytest

import gpubridge
from gpubridge import cli
from gpubridge.cli import tritonserver
from gpubridge.own_command import own_command
from tests.process.forked_commands import run_forked


def test_alone_it_prints_help(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for command, line in cli.COMMANDS.items():
        assert f"{command} {line}" in " ".join(printed.out.split())


def test_the_version_alone(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "0.1.0\n"


def test_a_server_does_not_search_what_it_imported_for_garbage(tmp_path):
    code = (
        "import gc, sys, uvloop\n"
        "def run(serving):\n"
        "    serving.close()\n"
        "    print(gc.isenabled(), gc.get_freeze_count() > 10_000, file=sys.stderr)\n"
        "uvloop.run = run\n"
        "from gpubridge.cli import main\n"
        "main(['serve', sys.argv[1]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr == "True True\n"


def test_a_server_imports_no_numpy_and_has_no_threads_for_linear_algebra(tmp_path):
    code = (
        "import os, sys, uvloop\n"
        "def run(serving):\n"
        "    serving.close()\n"
        "    print('numpy' in sys.modules, file=sys.stderr)\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    import numpy\n"
        "    said = len(os.listdir('/proc/self/task')) - before, os.environ.get('OPENBLAS_NUM_THREADS')\n"
        "    print(*said, file=sys.stderr)\n"
        "uvloop.run = run\n"
        "from gpubridge.cli import main\n"
        "main(['serve', sys.argv[1]])\n"
    )
    for given in ({}, {"OPENBLAS_NUM_THREADS": "4"}):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "", **given}
        if not given:
            del environment["OPENBLAS_NUM_THREADS"]
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.split() == ["False", "0", given.get("OPENBLAS_NUM_THREADS", "None")]


@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        (["serve", "m", "--nope"], "gpubridge serve [REPOSITORY ...] [FLAG ...]", "unknown flag --nope"),
        (["serve", "--http-port=x"], "gpubridge serve [REPOSITORY ...] [FLAG ...]", "--http-port"),
        (["doctor", "--verbose"], "gpubridge doctor [ENVIRONMENT ...]", "unknown flag --verbose"),
        (["top", "x", "y"], "gpubridge top [URL] [--once] [--interval SECONDS] [--header NAME:VALUE]", "expected flags only, got 'y'"),
        (["init"], "gpubridge init MODEL_DIR", "the following arguments are required"),
        (["srve"], "gpubridge COMMAND ...", "invalid choice: 'srve'"),
        (["--nope"], "gpubridge COMMAND ...", "unknown flag --nope"),
        (["--versoin"], "gpubridge COMMAND ...", "did you mean --version?"),
        (
            ["bench", "zero"],
            "gpubridge bench load URL MODEL [FLAG ...] | gpubridge bench zero-copy [FLAG ...]",
            "invalid choice: 'zero'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_of_usage_and_one_of_what_is_wrong(
    capsys, words, usage, error
):
    assert cli.main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"usage: {usage}  (")
    assert second.startswith("error: ")
    assert error in second


def test_a_repository_must_be_named(capsys):
    assert cli.main(["serve"]) == 1
    assert "--model-repository expects at least one directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "tritonserver"])
def test_help_has_headings_defaults_and_no_broken_flags(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    headings = ["Model repository:", "Server:", "HTTP:", "gRPC:", "Metrics:", "Logging:", "Memory:"]
    assert [line for line in lines if line in headings] == headings
    address = "127.0.0.1" if command == "serve" else "0.0.0.0"
    assert f"to listen on (default: {address})" in text
    assert "--model-control-mode {none,poll,explicit}" in text
    assert "(default: [])" not in text
    epilog = text.rpartition("\n\n")[2].split()
    assert epilog[:3] == ["Accepted", "without", "effect:"]
    assert all(word.startswith("--") and not word.endswith("-") for word in epilog[3:])


def test_tritonserver_is_a_program_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tritonserver", "--nope"])
    assert tritonserver.main() == 2
    assert capsys.readouterr().err.startswith(
        "usage: tritonserver [FLAG ...]  (tritonserver --help"
    )


class TestInit:
    def test_its_model_runs_as_it_says(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["init", "models/my sum"]) == 0
        said = capsys.readouterr().out
        (line,) = [line for line in said.splitlines() if "gpubridge run" in line]
        words = shlex.split(line.partition("gpubridge ")[2])
        done = run_forked(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "TOTAL: FP32 [1, 1] [[6.5]]\n"), done.stderr
        assert "gpubridge serve 'models/my sum'" in said
        assert "http://127.0.0.1:8000/v2/models/my%20sum/infer" in said

    def test_it_overwrites_nothing(self, capsys, tmp_path):
        (tmp_path / "m").mkdir()
        assert cli.main(["init", str(tmp_path / "m")]) == 1
        assert capsys.readouterr().err == f"error: {tmp_path / 'm'} already exists\n"
        assert list((tmp_path / "m").iterdir()) == []

    @pytest.mark.parametrize("name", [".", "..", ".hidden", "/"])
    def test_a_model_needs_a_name(self, capsys, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["init", name]) == 1
        assert "expected a directory with the name of the model" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh"])
    def test_a_shell_learns_commands_and_flags(self, capsys, shell):
        pytest.importorskip("shtab")
        assert cli.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for word in ("tritonserver", "--grpc-max-connection-age", "--pdb", "zero-copy", "explicit"):
            assert word in script
        assert "_shtab_tritonserver" in script
        if shell == "bash" and shutil.which("bash"):
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    def test_it_ends_quietly_when_nobody_reads(self):
        pytest.importorskip("shtab")
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "gpubridge", "completion", "bash"]
        with os.fdopen(write, "w") as nobody:
            done = subprocess.run(
                command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr) == (1, "")

    def test_without_its_package_it_says_which(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "shtab", None)
        assert cli.main(["completion", "bash"]) == 1
        assert "pip install 'gpubridge[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["gpubridge", "gpubridge.one_file"])
def test_a_command_of_its_own_runs_this_package_whatever_the_working_directory_has(
    tmp_path, module
):
    (tmp_path / "gpubridge").mkdir()
    (tmp_path / "gpubridge" / "__init__.py").write_text("raise SystemExit('another one')")
    (tmp_path / "app.py").write_text("import beside")
    (tmp_path / "beside.py").touch()
    words = ["--version"] if module == "gpubridge" else ["app.py", str(os.getpid())]
    printed = subprocess.check_output([*own_command(module), *words], cwd=tmp_path, text=True)
    assert printed.strip() in (gpubridge.__version__, '{"models": {}}')


def test_the_importer_of_a_file_ends_with_who_asked(tmp_path):
    (tmp_path / "app.py").write_text(
        "import os, signal, sys\n"
        "print(os.getpid(), file=sys.stderr, flush=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: signal.pause()\n"
    )
    asker = "from gpubridge.engine.repository.one_file import OneFileModels as Models;"
    command = [sys.executable, "-c", f"{asker} Models().directories('{tmp_path}/app.py')"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        importer = os.pidfd_open(int(process.stderr.readline()))
        process.kill()
        # Readable once it has ended.
        assert select.select([importer], [], [])[0]
        os.close(importer)
