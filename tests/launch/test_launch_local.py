"""The local launcher: output, signals and exit codes."""

import ast
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, last_error

from launch import local

INDEX = "import os, signal, sys, time; i = int(os.environ['VIT_JAX_PROCESS_ID']); "


def launch(count: int, code: str, *arguments: str) -> int:
    return local.main(
        [f"--num_processes={count}", *arguments, "--", sys.executable, "-c", INDEX + code]
    )


def test_each_line_says_which_process_wrote_it(capfd):
    code = "print('out', i, flush=True); print('err', i, file=sys.stderr)"
    assert launch(3, code) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{i}] out {i}" for i in range(3)]
    assert sorted(err.splitlines()) == [f"[{i}] err {i}" for i in range(3)]


def test_output_goes_to_files_on_request(tmp_path, capfd):
    code = "print('out', i, flush=True); print('err', i, file=sys.stderr); sys.exit(3 * i)"
    assert launch(2, code, f"--logs={tmp_path}/a/b") == 3
    assert [(tmp_path / f"a/b/process_{i}.txt").read_text() for i in range(2)] == [
        f"out {i}\nerr {i}\n" for i in (0, 1)
    ]
    out, err = capfd.readouterr()
    assert out == "" and "process 1 ended first, with exit code 3" in err and "err 1" in err


def test_the_processes_find_their_job_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    code = f"open(f'{tmp_path}/{{i}}', 'w').write(repr(dict(os.environ)))"
    assert launch(2, code, "--devices=4") == 0
    found = [ast.literal_eval((tmp_path / str(i)).read_text()) for i in range(2)]
    assert found[0]["VIT_JAX_COORDINATOR"] == found[1]["VIT_JAX_COORDINATOR"]
    assert found[0]["VIT_JAX_COORDINATOR"].startswith("127.0.0.1:")
    assert {env["VIT_JAX_NUM_PROCESSES"] for env in found} == {"2"}
    flags = "--xla_dump_to=x --xla_force_host_platform_device_count=4"
    assert all(env["XLA_FLAGS"] == flags and env["JAX_PLATFORMS"] == "cpu" for env in found)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(0 if i else 75)", 75),
        ("time.sleep(0.5 * i); sys.exit(2 if i else 75)", 2),
        ("sys.exit((0, 1, 0)[i])", 1),
        ("os.kill(os.getpid(), signal.SIGKILL) if i == 1 else None", 137),
        ("time.sleep(i); sys.exit(5 - i)", 5),
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed(code, expected, capfd):
    assert launch(3, code) == expected


def test_one_failure_ends_all(monkeypatch, capfd):
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    assert launch(3, "sys.exit(7) if i == 1 else time.sleep(600)") == 7
    assert "process 1 ended first, with exit code 7" in capfd.readouterr().err


def start(code: str) -> subprocess.Popen:
    """A launcher of two processes that have reported that they are ready."""
    command = [sys.executable, "-m", "launch.local", "--num_processes=2"]
    command += ["--", sys.executable, "-c", INDEX + code]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded(number):
    code = "handle = lambda *_: (print('received', flush=True), sys.exit(75));"
    # Short sleeps: a signal that comes right before a long one is handled after it.
    code += f"signal.signal({int(number)}, handle); print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    job = start(code)
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert sorted(out.splitlines()) == ["[0] received", "[1] received"]
    assert "the same command continues" in err


def test_a_second_signal_kills():
    code = (
        "signal.signal(15, lambda *_: print('received', flush=True)); print('ready', flush=True)\n"
    )
    job = start(code + "while True: time.sleep(1)")
    job.send_signal(signal.SIGTERM)
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] received\n", "[1] received\n"]
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL


def test_signals_are_as_before_afterwards(capfd):
    before = signal.getsignal(signal.SIGINT)
    assert launch(1, "pass") == 0
    assert signal.getsignal(signal.SIGINT) is before


BAD = {
    "none": (["--num_processes=0", "--", "true"], "--num_processes=0 must be at least 1"),
    "not a number": (["--num_processes=x", "--", "true"], "invalid int value: 'x'"),
    "devices": (
        ["--num_processes=1", "--devices=-1", "--", "true"],
        "--devices=-1 must be at least 0",
    ),
    "no command": (["--num_processes=1"], "required: command"),
    "unknown command": (
        ["--num_processes=1", "--", "no_such_program"],
        "command no_such_program is not found",
    ),
    "logs": (["--num_processes=1", f"--logs={__file__}", "--", "true"], "is a file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_command_line_ends_in_one_line(case, capsys):
    arguments, message = BAD[case]
    with pytest.raises(SystemExit) as stop:
        local.main(arguments)
    line = last_error(capsys)
    assert stop.value.code == 2 and message in line
