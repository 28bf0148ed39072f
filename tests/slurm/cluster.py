"""A Slurm of two nodes on this machine: its own folder, ports and keys, apart from any other Slurm.

Debian's slurm-wlm and munge; the loopback only.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

from processes_at_hand import environment, expect, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
PACKAGES = ("slurm-wlm", "munge")
# JAX looks for the address of the first by name, in the order of the alphabet.
NODES = (socket.gethostname(), "zz2")
START_S = 60
CONF = """
ClusterName=trials
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={folder}/munge.socket,cred_expire=5
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool_%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=15
KillWait=20
OverTimeLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=2,requeue_delay=1,bf_interval=2
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def missing() -> list[str]:
    """The programs of Slurm that this machine does not have."""
    return [name for name in PROGRAMS if not shutil.which(name, path=PATH)]


class Cluster:
    """Started on entry; everything it started has ended on exit."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self):
        (self.folder / "state").mkdir(parents=True)
        for node in NODES:
            (self.folder / f"spool_{node}").mkdir()
        self.configure()
        try:
            self.start_munge()
            self.start("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            self.wait_for(lambda: self.idle() == len(NODES), START_S, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for node in NODES:
            self.kill_node(node)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait()

    def configure(self) -> None:
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            for node in NODES
        )
        text = CONF.format(
            host=host,
            controller_port=free_port(),
            first_job=1 + os.getpid() % 60_000,  # JAX derives its port from the job's number
            folder=self.folder,
            nodes=nodes,
        )
        (self.folder / "slurm.conf").write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        return environment() | dict(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=PATH)

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("a")
        self.daemons[name] = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
            "seed-file": self.folder / "munge.seed",
        }
        words = [f"--{name}={path}" for name, path in files.items()]
        self.start("munged", "munged", "--foreground", "--force", *words)
        self.wait_for((self.folder / "munge.socket").exists, START_S, "munge")

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's daemon and to all that runs there."""
        daemon = self.daemons.pop(node, None)
        if daemon is None:
            return
        for pid in self.processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def processes_of(self, node: str) -> list[int]:
        """Slurm's step daemons of a node and what they run, by their environment and name."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables
            on_node = f"SLURMD_NODENAME={node}".encode() in variables
            is_step = words.startswith(b"slurmstepd")
            if is_ours and (on_node or (is_step and self.parent_of_step(path) == node)):
                found.append(int(path.name))
        return found

    def parent_of_step(self, path: pathlib.Path) -> str:
        """The node of a step daemon: one of its children says it."""
        with contextlib.suppress(OSError):
            for child in (path / f"task/{path.name}/children").read_text().split():
                variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                for variable in variables:
                    if variable.startswith(b"SLURMD_NODENAME="):
                        return variable.partition(b"=")[2].decode()
        return ""

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        expect(done.returncode == 0, f"{command} failed: {done.stderr}")
        return done.stdout

    def idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "normal", "-o", "%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split().count("idle")

    def submit(self, folder: pathlib.Path, *command: str, options=(), **variables: str) -> str:
        """Submits a job of two nodes as a user would; returns its number."""
        script = pathlib.Path(__file__).parents[2] / "launch/slurm.sbatch"
        words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", *options]
        done = subprocess.run(
            [*words, str(script), *command],
            env=self.environment | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        expect(done.returncode == 0, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for(self, done, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not done():
            expect(time.monotonic() < end, f"no {what} within {seconds} s; see {self.folder}")
            time.sleep(0.3)
