"""How the processes of one job find each other, and what a process says that finds no others."""

import logging
import os
import re
import socket
import threading

import jax
from jax._src.distributed import global_state  # no public API exposes the coordinator

from vit_jax.distributed import messages
from vit_jax.distributed.messages import START_TIMEOUT
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

COORDINATOR = "VIT_JAX_COORDINATOR"
COUNT = "VIT_JAX_NUM_PROCESSES"
INDEX = "VIT_JAX_PROCESS_ID"
VARIABLES = (COORDINATOR, COUNT, INDEX)
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")

HEARTBEAT_S = 40  # after which JAX notices that a process was killed, and ends the others
SHUTDOWN_S = 120


def start() -> None:
    """Joins the processes of one job: explicit VIT_JAX_* variables, else a cluster that JAX
    detects, else one process.

    A UserError says what is wrong if not all processes join within VIT_JAX_START_TIMEOUT seconds.
    """
    if jax.distributed.is_initialized():
        return
    arguments = explicit()
    seconds = start_timeout()
    if arguments.get("process_id") == 0:
        check_port(arguments["coordinator_address"])
    error = join(arguments, seconds)
    if error and not is_alone(error, arguments):
        raise UserError(
            f"this process can't join the others of its job ({one_line(error)[:300]}): correct "
            "the environment (a free port, the variables of the cluster), or set "
            f"{', '.join(VARIABLES)} in each process"
        ) from error
    messages.joined.set()


def join(arguments: dict, seconds: int) -> Exception | None:
    """Calls `jax.distributed.initialize` and returns the error that it raises.

    It waits in a thread, since the call itself can't be interrupted. If JAX can't join in time, it
    ends the process with a core dump, so JAX gets more time than we wait.
    """
    errors = []

    def initialize():
        try:
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=seconds + 60,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                shutdown_timeout_seconds=SHUTDOWN_S,
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise UserError(not_joined(seconds))
    return errors[0] if errors else None


def explicit() -> dict:
    """Arguments of `jax.distributed.initialize` from VIT_JAX_*; {} if none of them is set."""
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not values:
        return {}
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        values.setdefault(COORDINATOR, os.environ["JAX_COORDINATOR_ADDRESS"])
    missing = [name for name in VARIABLES if name not in values]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set in the environment: set all of {', '.join(VARIABLES)}"
        )
    try:
        count = int(values[COUNT])
        index = int(values[INDEX])
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
            f"{COORDINATOR}={address} in the environment is not HOST:PORT: give host and port of "
            "process 0"
        )
    return dict(
        coordinator_address=address,
        num_processes=count,
        process_id=index,
        cluster_detection_method="deactivate",
    )


def start_timeout() -> int:
    """Seconds that a process waits for the others at the start."""
    return seconds_from_environment(START_TIMEOUT, "300")


def seconds_from_environment(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{name}={text} in the environment is not a number of seconds: give a whole number "
            "above 0"
        )
    return int(text)


def is_alone(error: Exception, arguments: dict) -> bool:
    """Whether JAX failed to join because there is nothing to join."""
    nothing_found = "coordinator_address should be defined" in str(error)
    computes_already = "must be called before" in str(error)  # for example in a notebook
    return not arguments and (nothing_found or computes_already)


def not_joined(seconds: int) -> str:
    """The error of a process that waited `seconds` in vain."""
    address = global_state.coordinator_address
    index = global_state.process_id
    count = global_state.num_processes
    hints = f"; to wait longer, set {START_TIMEOUT}=SECONDS"
    proxies = [name for name in PROXIES if name in os.environ]
    if proxies:
        hints += f"; {' and '.join(proxies)} in the environment may catch the connection: unset it"
    if address is None:
        return (
            f"the cluster that JAX detects did not name its leader within {seconds} s: check that "
            f"its metadata can be read, or set {', '.join(VARIABLES)}{hints}"
        )
    if index == 0:
        return (
            f"not all {count} processes joined process 0 at {address} within {seconds} s: check "
            "that all were started, can reach this address, and have the same number of "
            f"processes{hints}"
        )
    problem = connection_problem(address)
    if problem:
        return (
            f"process {index} can't reach the coordinator, process 0 at {address}, within "
            f"{seconds} s ({problem}): start process 0 there, open the port, or correct "
            f"{COORDINATOR}{hints}"
        )
    return (
        f"process {index} of {count} reached {address}, but not all processes joined within "
        f"{seconds} s: check that all {count} were started, and that process 0 and no other "
        f"program listens there{hints}"
    )


def check_port(address: str) -> None:
    """Raises UserError if this process can't listen on the port of "host:port": JAX may crash."""
    try:
        socket.create_server(("", int(address.rsplit(":", 1)[1]))).close()
    except (OSError, OverflowError) as error:
        problem = str(error) if isinstance(error, OverflowError) else os.strerror(error.errno)
        raise UserError(
            f"process 0 can't listen on {address} ({problem}): choose a free port in {COORDINATOR}"
        ) from error


def connection_problem(address: str) -> str | None:
    """Why no connection to "host:port" is possible; None if one is."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
