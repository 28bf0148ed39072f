"""How processes find each other, check each other, and end together; clusters are simulated by
their environment variables.
"""

import os
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from jax._src.clusters import cloud_tpu_cluster

from vit_jax import config as configs
from vit_jax.distributed import job as jobs
from vit_jax.distributed import preflight, processes, waits
from vit_jax.distributed.job import Job
from vit_jax.errors import UserError

slow = pytest.mark.slow

# A command that does WHAT in the process WHO, by its argument "WHAT:WHO".
JOIN = """
import os, signal, sys, time
from etils import epath
from vit_jax import cli, errors
from vit_jax.distributed import peers, preflight, processes, watchdog

what, _, who = sys.argv[1].partition(":")
processes.HEARTBEAT_S = 15
if what in ("hasty", "preempted"):
    watchdog.POLL_S = 0

def main():
    processes.start()
    import jax
    index = jax.process_index()
    me = who == str(index)
    with cli.logging_to(None):
        if what == "fail" and me:
            raise errors.UserError("process has no data: get some")
        peers.LINE_S = 1 if what == "late" else 10
        if what == "late" and me:
            time.sleep(30)
        folder = None
        if len(sys.argv) > 2:
            folder = epath.Path(sys.argv[2] + "/other" * (what == "apart" and me))
        lr = 2 if what == "differ" and me else 1
        preflight.check({"optim.lr": lr, "data.threads": index}, folder)
        if what == "stall":
            for step in range(1, 2 if me else 4):
                watchdog.progress.mark(f"step {step}")
            time.sleep(300)
        if what == "gone":
            from jax.experimental import multihost_utils
            while True:
                multihost_utils.process_allgather(index)
                if me:
                    os.kill(os.getpid(), signal.SIGKILL)
        if what == "break":
            if me:
                raise errors.NegativeResult("the answer is no")
            time.sleep(300)
        if what == "kill":
            if me:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        count = jax.process_count()
        print(f"process {index} of {count} on {jax.device_count()} devices", flush=True)
        if what == "preempted":
            raise errors.Preempted
        if what == "afterwards" and me:
            time.sleep(3)
            raise errors.NegativeResult("the table can't be drawn")

sys.exit(watchdog.run(main, False))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(variables: dict[str, str], what: str = "join", *more: str) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(ROOT)) | variables
    command = [sys.executable, "-c", JOIN, what, *more]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(jobs: list[subprocess.Popen]) -> list[tuple[int, str, list[str]]]:
    """(exit code, stdout, errors) by process."""
    found = [job.communicate(timeout=120) for job in jobs]
    lines = [[line for line in err.splitlines() if line.startswith("error: ")] for _, err in found]
    for job, (_, err), errors in zip(jobs, found, lines, strict=True):
        assert "Traceback" not in err and len(errors) <= 1, err
        assert (job.returncode == 0) == (not errors) or job.returncode < 0, err
    outs = [out for out, _ in found]
    return list(zip([job.returncode for job in jobs], outs, lines, strict=True))


def explicit(index: int, port: int, count: int = 2, **more: str) -> dict[str, str]:
    values = (f"localhost:{port}", str(count), str(index))
    return more | dict(zip(processes.VARIABLES, values, strict=True))


CLUSTERS = {
    "Slurm": lambda i, port: dict(
        SLURM_JOB_ID=str(port), SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2",
        SLURM_PROCID=i, SLURM_LOCALID=i,
    ),
    "Open MPI": lambda i, port: dict(
        OMPI_MCA_orte_hnp_uri=f"{port * 2**12}.0;tcp://127.0.0.1:1", OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_RANK=i, OMPI_COMM_WORLD_LOCAL_RANK=i,
    ),
    "GKE": lambda i, port: dict(
        JAX_FORCE_TPU_INIT="1", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0", MEGASCALE_COORDINATOR_ADDRESS="localhost:8080",
        MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID=i, JAX_COORDINATOR_PORT=str(port),
    ),
    "explicit": lambda i, port: explicit(int(i), port),
    "explicit, address as JAX names it": lambda i, port: dict(
        JAX_COORDINATOR_ADDRESS=f"localhost:{port}", VIT_JAX_NUM_PROCESSES="2", VIT_JAX_PROCESS_ID=i
    ),
}  # fmt: skip


@slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_two_processes_find_each_other(cluster):
    port = free_port()
    found = finish([start(CLUSTERS[cluster](str(i), port)) for i in range(2)])
    last_lines = [out.splitlines()[-1] for _, out, _ in found]
    assert last_lines == [f"process {i} of 2 on 2 devices" for i in range(2)], found


@slow
def test_without_a_cluster_and_with_a_cluster_of_one_there_is_one_process():
    slurm = CLUSTERS["Slurm"]("0", free_port()) | dict(SLURM_NTASKS="1")
    for variables in ({}, slurm, explicit(0, free_port(), count=1)):
        assert finish([start(variables)])[0][:2] == (0, "process 0 of 1 on 1 devices\n"), variables


WRONG = {
    "one is missing": (
        dict(VIT_JAX_COORDINATOR="localhost:1"),
        "VIT_JAX_NUM_PROCESSES, VIT_JAX_PROCESS_ID not set",
    ),
    "not a number": (explicit(0, 1) | dict(VIT_JAX_NUM_PROCESSES="two"), "must be whole numbers"),
    "too large": (explicit(2, 1), "VIT_JAX_PROCESS_ID=2 is not below VIT_JAX_NUM_PROCESSES=2"),
    "no port": (
        explicit(0, 1) | dict(VIT_JAX_COORDINATOR="localhost"),
        "VIT_JAX_COORDINATOR=localhost .* is not HOST:PORT",
    ),
    "not seconds": (
        explicit(0, 1) | dict(VIT_JAX_START_TIMEOUT="soon"),
        "VIT_JAX_START_TIMEOUT=soon .* is not a number of seconds",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_variables_are_named(case, monkeypatch):
    variables, message = WRONG[case]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=message):
        processes.start()


@slow
def test_wrong_variables_of_a_cluster_end_in_one_line():
    for variables in (CLUSTERS["Slurm"]("x", 1), dict(JAX_COORDINATOR_ADDRESS="localhost:1")):
        code, _, errors = finish([start(variables)])[0]
        assert code == 2 and "can't join" in errors[0] and "VIT_JAX_COORDINATOR" in errors[0]


@slow
def test_processes_that_wait_in_vain_say_for_whom():
    port = free_port()
    patience = dict(VIT_JAX_START_TIMEOUT="3")
    ports = (port, free_port())
    leader, other = finish([start(explicit(i, ports[i]) | patience) for i in range(2)])
    assert leader[0] == other[0] == 2
    assert f"not all 2 processes joined process 0 at localhost:{port} within 3 s" in leader[2][0]
    assert "process 1 can't reach the coordinator" in other[2][0]
    assert "Connection refused" in other[2][0]


@slow
def test_a_port_in_use_ends_in_one_line():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = finish([start(explicit(i, port, VIT_JAX_START_TIMEOUT="5")) for i in range(2)])
    assert [code for code, _, _ in found] == [2, 2]
    assert f"process 0 can't listen on localhost:{port} (Address already in use)" in found[0][2][0]
    assert "no other program" in found[1][2][0]


def test_a_proxy_is_named_where_the_start_fails(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy")
    assert "https_proxy in the environment" in processes.not_joined(Job("localhost:1", 2, 1))


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(processes.jobs, "detect", lambda seconds: time.sleep(60))
    monkeypatch.setattr(processes.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match="did not name its leader within 1 s"):
        processes.find_job(1)


TPUS = dict(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID="1")
SLICES = dict(MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="1")
SLICES |= dict(MEGASCALE_COORDINATOR_ADDRESS="leader:8080")


@pytest.fixture
def gke(monkeypatch):
    """Sets the variables of a TPU cluster in which JAX believes to be."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)

    def detect(**variables: str):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return jobs.detect(1)

    return detect


def test_on_tpus_the_coordinator_listens_where_the_firewall_is_open(gke):
    found = gke(**TPUS)
    assert (found.address, found.count, found.index, found.hint) == ("a:8476", 2, 1, "")
    found = gke(**TPUS | SLICES)
    assert (found.address, found.count, found.index) == ("leader:8476", 4, 3)
    assert gke(**TPUS, JAX_COORDINATOR_PORT="99").address == "a:99"
    assert gke(**TPUS, JAX_COORDINATOR_ADDRESS="mine:98").address == "mine:98"
    slurm = CLUSTERS["Slurm"]("0", 5)
    assert not gke(**slurm).address.endswith(jobs.TPU_PORT)


def test_multislice_variables_of_an_earlier_job_are_named(gke, monkeypatch):
    assert gke(**TPUS | SLICES).hint == (
        "; the environment has MEGASCALE_COORDINATOR_ADDRESS=leader:8080, MEGASCALE_NUM_SLICES=2, "
        "MEGASCALE_SLICE_ID=1: unset MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES, "
        "MEGASCALE_SLICE_ID if they are left from an earlier job"
    )
    assert (
        "=2, without MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_SLICE_ID: unset"
        in gke(**TPUS, MEGASCALE_NUM_SLICES="2").hint
    )
    with pytest.raises(UserError, match="MEGASCALE_SLICE_ID=3 is not below MEGASCALE_NUM_SLICES=2"):
        gke(**TPUS | SLICES | dict(MEGASCALE_SLICE_ID="3"))

    # A TPU VM of a single slice, by its metadata.
    metadata = {"agent-worker-number": "1", "worker-network-endpoints": "x:y:10.0.0.1,x:z:10.0.0.2"}
    monkeypatch.setattr(
        cloud_tpu_cluster, "get_metadata", lambda key: (metadata.get(key, "ZONE: 'z'"), 200)
    )
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    assert gke().address == "10.0.0.1:8476" and gke().hint == ""
    stale = gke(**SLICES)
    assert stale.address == "leader:8476"
    assert "; this machine's metadata have MEGASCALE_NUM_SLICES=(unset)" in stale.hint


def test_keys_of_the_machine_may_differ():
    assert configs.may_differ_by_host("data.threads")
    assert configs.may_differ_by_host("evals.val.data.data_dir")
    assert not configs.may_differ_by_host("data.name")
    assert not configs.may_differ_by_host("data")


def test_differences_name_keys_and_both_values():
    one, two = dict(a="1", b="2", c="3"), dict(a="1", b="4", d="5")
    assert preflight.differences(one, two) == "b: 2 -> 4; c: 3 -> (unset); d: (unset) -> 5"


@slow
def test_all_refuse_when_one_differs():
    port = free_port()
    found = finish([start(explicit(i, port), "differ:1") for i in range(2)])
    for code, _, errors in found:
        assert code == 2
        assert "process 1 differs from process 0 (optim.lr: 1 -> 2)" in errors[0]


@slow
def test_all_refuse_when_the_workdir_is_not_shared(tmp_path):
    (tmp_path / "other").mkdir()
    for what in ("apart:1", "together:1"):
        port = free_port()
        found = finish([start(explicit(i, port), what, str(tmp_path)) for i in range(2)])
        for code, _, errors in found:
            assert code == (2 if what == "apart:1" else 0)
            assert not errors or f"{tmp_path}/other is not shared with process 0" in errors[0]
        assert [path.name for path in tmp_path.iterdir()] == ["other"]


@slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("what", "code"), [("fail", 2), ("break", 1), ("afterwards", 1)])
def test_the_error_of_one_process_ends_all(what, code, who):
    port = free_port()
    found = finish([start(explicit(i, port), f"{what}:{who}") for i in range(2)])
    assert [found[i][0] for i in range(2)] == [code, code]
    (own,), (other,) = found[who][2], found[1 - who][2]
    assert other == own.replace("error: ", f"error: process {who} of the job stopped: ")


@slow
@pytest.mark.parametrize(("what", "code"), [("hasty", 0), ("preempted", 75)])
def test_processes_that_poll_each_other_all_the_time_end_in_order(what, code):
    """Processes that ended while their thread asked process 0 used to be aborted."""
    port = free_port()
    jobs = [start(explicit(i, port, count=4), what) for i in range(4)]
    errors = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [code] * 4, errors


@slow
def test_a_process_that_comes_too_late_is_named():
    port = free_port()
    patience = dict(VIT_JAX_START_TIMEOUT="8")
    jobs = [start(explicit(i, port) | patience, "late:1") for i in range(2)]
    errors = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [69, 69]
    assert "waiting for process 1 of 2 to reach the start, for up to 8 s" in errors[0]
    assert "error: process 1 of 2 did not reach the start within 8 s" in errors[0]


@slow
def test_of_three_the_one_that_differs_is_named():
    port = free_port()
    found = finish([start(explicit(i, port, count=3), "differ:0") for i in range(3)])
    for code, _, errors in found:
        assert code == 2
        assert "process 0 differs from process 1 (optim.lr: 1 -> 2)" in errors[0]


@slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_job_that_stalls_ends_and_names_who_is_behind(who):
    port = free_port()
    patience = dict(VIT_JAX_STALL_TIMEOUT="6")
    found = finish([start(explicit(i, port) | patience, f"stall:{who}") for i in range(2)])
    for code, _, errors in found:
        assert code == 69 and "the job made no progress for 6 s" in errors[0]
        assert f"process {who} is at step 1, the others wait at step 3" in errors[0]


def test_a_wrong_stall_timeout_is_named(monkeypatch):
    monkeypatch.setenv("VIT_JAX_STALL_TIMEOUT", "never")
    message = "VIT_JAX_STALL_TIMEOUT=never in the environment is not a number of seconds"
    with pytest.raises(UserError, match=message):
        waits.stall_timeout()


@slow
def test_survivors_say_who_died():
    port = free_port()
    found = finish([start(explicit(i, port, count=3), "gone:2") for i in range(3)])
    for code, _, errors in found[:2]:
        assert code == 69 and "process 2 of 3 died or can't be reached" in errors[0]


@slow
@pytest.mark.parametrize("who", [0, 1])
def test_survivors_of_a_killed_process_end(who):
    port = free_port()
    found = finish([start(explicit(i, port), f"kill:{who}") for i in range(2)])
    assert found[who][0] == -9 and found[1 - who][0] not in (0, 75)


@pytest.mark.parametrize(
    ("address", "addresses", "expected"),
    [
        ("127.0.0.1:5", ["127.0.0.1"], "127.0.0.1:5"),
        ("[::1]:5", ["::1"], "[::1]:5"),
        ("localhost:5", ["::1", "127.0.0.1"], "127.0.0.1:5"),
        ("node7:5", ["10.0.0.7"], "10.0.0.7:5"),
        ("10.0.0.7:5", ["10.0.0.7"], "10.0.0.7:5"),
        ("fe80::7%eth0:5", ["fe80::7%eth0"], "[fe80::7%eth0]:5"),
        ("node7:5", ["127.0.1.1"], "[::]:5"),  # to the others it is another address
        ("node7:5", ["10.0.0.7", "172.17.0.1"], "[::]:5"),
        ("balancer:5", ["10.9.9.9"], "[::]:5"),
        ("unknown:5", [], "[::]:5"),
    ],
)
def test_process_0_listens_at_its_own_address_if_that_is_certain(
    address, addresses, expected, monkeypatch
):
    def getaddrinfo(host, *_, **__):
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(None, None, None, "", (each, 0)) for each in addresses]

    monkeypatch.delenv(jobs.BIND, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(jobs, "is_ours", lambda each: each != "10.9.9.9")
    assert jobs.bind_address(address) == expected
    monkeypatch.setenv(jobs.BIND, "[::]:9")
    assert jobs.bind_address(address) == "[::]:9"
    monkeypatch.setenv(jobs.BIND, "everywhere")
    with pytest.raises(UserError, match=r"JAX_COORDINATOR_BIND_ADDRESS=everywhere in .* HOST:PORT"):
        jobs.bind_address(address)


def test_only_addresses_of_this_machine_are_ours():
    assert jobs.is_ours("127.0.0.1")
    assert not jobs.is_ours("203.0.113.1")  # reserved for documentation
