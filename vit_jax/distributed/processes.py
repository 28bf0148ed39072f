"""The processes of one job: how they find each other."""

import logging
import os
import re
import socket
import threading

import jax
from jax._src.distributed import global_state  # no public API exposes the coordinator

from vit_jax.distributed import messages
from vit_jax.distributed.messages import TIMEOUT
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

COORDINATOR, COUNT, INDEX = VARIABLES = (
    "VIT_JAX_COORDINATOR",
    "VIT_JAX_NUM_PROCESSES",
    "VIT_JAX_PROCESS_ID",
)

HEARTBEAT_S, SHUTDOWN_S = (
    40,
    120,
)  # a process that was killed is noticed after the first by the others, which then end


def start() -> None:
    """Joins the processes of one job: explicit VIT_JAX_* variables, else a cluster that JAX
    detects, else one process.

    JAX ends the process with a core dump where it can't join in time, so it gets more time than we
    wait.

    Raises:
      UserError: a variable is missing or wrong, the port of process 0 is taken, or not all
        processes joined within VIT_JAX_START_TIMEOUT seconds.
    """
    if jax.distributed.is_initialized():
        return
    arguments, seconds, raised = explicit(), timeout(), []
    if arguments.get("process_id") == 0 and (
        problem := not_listening(arguments["coordinator_address"])
    ):
        raise UserError(
            f"process 0 can't listen on {arguments['coordinator_address']} ({problem}): choose a "
            f"free port in {COORDINATOR}"
        )

    def join():
        try:
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=seconds + 60,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                shutdown_timeout_seconds=SHUTDOWN_S,
            )
        except Exception as error:
            raised.append(error)

    # The call can't be interrupted; waiting for a thread can.
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise UserError(not_joined(seconds))
    if raised and not is_alone(raised[0], arguments):
        raise UserError(
            f"this process can't join the others of its job ({one_line(raised[0])[:300]}): correct "
            "the environment (a free port, the variables of the cluster), or set "
            f"{', '.join(VARIABLES)} in each process"
        ) from raised[0]
    messages.joined.set()


def explicit() -> dict:
    """Arguments of `jax.distributed.initialize` from VIT_JAX_*; none where the environment has none
    of them.

    Raises:
      UserError: some are missing, or no numbers.
    """
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not values:
        return {}
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        values.setdefault(COORDINATOR, address)
    if missing := [name for name in VARIABLES if name not in values]:
        raise UserError(
            f"{', '.join(missing)} not set in the environment: set all of {', '.join(VARIABLES)}"
        )
    try:
        count, index = int(values[COUNT]), int(values[INDEX])
    except ValueError:
        raise UserError(
            f"{COUNT} and {INDEX} in the environment must be whole numbers: correct them"
        ) from None
    if not 0 <= index < count:
        raise UserError(
            f"{INDEX}={index} is not below {COUNT}={count} in the environment: correct them"
        )
    address = values[COORDINATOR]
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise UserError(
            f"{COORDINATOR}={address} in the environment is no HOST:PORT: give host and port of "
            "process 0"
        )
    return dict(
        coordinator_address=address,
        num_processes=count,
        process_id=index,
        cluster_detection_method="deactivate",
    )


def timeout() -> int:
    text = os.environ.get(TIMEOUT, "300")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{TIMEOUT}={text} in the environment is no number of seconds: give a whole one above 0"
        )
    return int(text)


def is_alone(error: Exception, arguments: dict) -> bool:
    """Whether JAX failed to join because there is nothing to join."""
    nothing_found = "coordinator_address should be defined" in str(error)
    computes_already = "must be called before" in str(error)  # such as a notebook
    return not arguments and (nothing_found or computes_already)


def not_joined(seconds: int) -> str:
    """The error of a process that waited `seconds` in vain."""
    address, index, count = (
        global_state.coordinator_address,
        global_state.process_id,
        global_state.num_processes,
    )
    longer = f"; {TIMEOUT}=SECONDS waits longer"
    if proxies := [
        name for name in ("grpc_proxy", "https_proxy", "http_proxy") if name in os.environ
    ]:
        longer += (
            f"; {' and '.join(proxies)} of the environment may catch the connection: unset them"
        )
    if address is None:
        return (
            f"the cluster that JAX detects did not say within {seconds} s who leads: see that its "
            f"metadata can be read, or set {', '.join(VARIABLES)}{longer}"
        )
    if index == 0:
        return (
            f"not all {count} processes joined process 0 at {address} within {seconds} s: see that "
            f"all were started, reach this address, and have the same number of processes{longer}"
        )
    if problem := unreachable(address):
        return (
            f"process {index} can't reach the coordinator, process 0 at {address}, within "
            f"{seconds} s ({problem}): start process 0 there, open the port, or correct "
            f"{COORDINATOR}{longer}"
        )
    return (
        f"process {index} of {count} reached {address}, but the job was not complete within "
        f"{seconds} s: see that all {count} processes were started and that process 0, and no "
        f"other program, listens there{longer}"
    )


def not_listening(address: str) -> str | None:
    """Why this process can't listen on the port of "host:port", or None where it can. JAX at times
    crashes over it.
    """
    try:
        socket.create_server(("", int(address.rsplit(":", 1)[1]))).close()
    except OverflowError as error:
        return str(error)
    except OSError as error:
        return os.strerror(error.errno)
    return None


def unreachable(address: str) -> str | None:
    """Why no connection to "host:port" is possible, or None where it is."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
