"""How the processes of one job are joined, and what a process says that finds no others."""

import os
import time
from collections.abc import Callable

import jax
from jax._src import xla_bridge  # no public API says whether JAX has devices already

from vit_jax.distributed import job as jobs
from vit_jax.distributed import messages, peers, rendezvous
from vit_jax.distributed.job import START_TIMEOUT, VARIABLES, Job
from vit_jax.distributed.waits import in_thread
from vit_jax.errors import UserError, one_line

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")

HEARTBEAT_S = 40  # after which JAX notices that a process was killed, and ends the others
SHUTDOWN_S = 120


def start() -> None:
    """Joins the processes of one job: explicit VIT_JAX_* variables, else a cluster that JAX
    detects, else one process.

    Every ten seconds of waiting it says for whom. A UserError says what is wrong if not all
    processes join within VIT_JAX_START_TIMEOUT seconds.
    """
    if jax.distributed.is_initialized():
        return
    seconds = start_timeout()
    deadline = time.monotonic() + seconds
    job = find_job(seconds)
    if job:
        rendezvous.meet(job, round(max(deadline - time.monotonic(), 1)))
        join(job, max(deadline - time.monotonic(), 1))
    messages.joined.set()


def find_job(seconds: int) -> Job | None:
    """The job of this process; None if it is alone."""
    job = jobs.explicit()
    # One that computes already, such as a notebook, can't join others.
    if job or xla_bridge.backends_are_initialized():
        return job

    def describe() -> str:
        return (
            "waiting for the cluster to say where process 0 is; gives up after "
            f"{seconds} s ({START_TIMEOUT})"
        )

    try:
        return call(lambda: jobs.detect(seconds), seconds, describe)
    except TimeoutError:
        raise UserError(
            f"the cluster that JAX detects did not name its leader within {seconds} s: check that "
            f"its metadata can be read, or set {', '.join(VARIABLES)}; to wait longer, set "
            f"{START_TIMEOUT}=SECONDS"
        ) from None
    except UserError:
        raise
    except Exception as error:
        raise cannot_join(error) from error


def join(job: Job, seconds: float) -> None:
    """Calls `jax.distributed.initialize`, for which all processes are ready.

    If JAX can't join in time, it ends the process with a core dump, so JAX gets more time than we
    wait.
    """
    arguments = dict(coordinator_address=job.address, num_processes=job.count, process_id=job.index)
    if job.index == 0:
        arguments["coordinator_bind_address"] = jobs.bind_address(job.address)
    if not job.detected:
        arguments["cluster_detection_method"] = "deactivate"

    def initialize():
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=round(seconds) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )

    def describe() -> str:
        return (
            f"process {job.index} of {job.count}: all are here, and wait for JAX's coordinator at "
            f"{job.address}"
        )

    try:
        call(initialize, seconds, describe)
    except TimeoutError:
        raise UserError(not_joined(job)) from None
    except Exception as error:
        raise cannot_join(error) from error


def call(function: Callable, seconds: float, describe: Callable[[], str]):
    """The result of a function that can't be interrupted; TimeoutError after `seconds`."""
    with peers.awaited(describe):
        return in_thread(function).result(seconds)


def start_timeout() -> int:
    """Seconds that a process waits for the others at the start."""
    return jobs.seconds_from_environment(START_TIMEOUT, "300")


def cannot_join(error: Exception) -> UserError:
    return UserError(
        f"this process can't join the others of its job ({one_line(error)[:300]}): correct the "
        f"environment (a free port, the variables of the cluster), or set {', '.join(VARIABLES)} "
        "in each process"
    )


def not_joined(job: Job) -> str:
    """The error of a process that met all others, but whose JAX did not."""
    hints = f"; to wait longer, set {START_TIMEOUT}=SECONDS"
    proxies = [name for name in PROXIES if name in os.environ]
    if proxies:
        hints += f"; {' and '.join(proxies)} in the environment may catch the connection: unset it"
    return (
        f"process {job.index} of {job.count} met the others at {job.address}, but JAX's "
        "coordinator did not answer there: check that process 0 still runs, and that no other "
        f"program took its port{hints}"
    )
