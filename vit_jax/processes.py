"""The processes of one job: how they find each other, make sure that they do the same, and end together."""

import hashlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import jax
import numpy as np
from etils import epath
from jax._src.distributed import global_state  # nothing public says who leads, or passes a word without the devices

from vit_jax import errors
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

COORDINATOR, COUNT, INDEX = VARIABLES = ("VIT_JAX_COORDINATOR", "VIT_JAX_NUM_PROCESSES", "VIT_JAX_PROCESS_ID")
TIMEOUT = "VIT_JAX_START_TIMEOUT"

# A process that was killed is noticed after HEARTBEAT_S by the others, which then end. One that ends by an error of its
# own says so, which is read every POLL_S; process 0 leaves LINGER_S later than the others, because its end is theirs.
HEARTBEAT_S, SHUTDOWN_S, POLL_S, LINGER_S = 60, 120, 2, 6
FAILURE = "vit_jax/failure"

joined = threading.Event()  # JAX says that it is initialised before all are there

# Keys of a config that belong to a machine: they may differ from process to process.
OF_THE_MACHINE = re.compile(r"(.*\.)?data\.(data_dir|threads|prefetch|eval_cache_gib)")


# --- joining ----------------------------------------------------------------------------------------------------------


def start() -> None:
    """Joins the processes of one job: explicit VIT_JAX_* variables, else a cluster that JAX detects, else one process.

    JAX ends the process with a core dump where it can't join in time, so it gets more time than we wait.

    Raises:
      UserError: a variable is missing or wrong, the port of process 0 is taken, or not all processes joined within
        VIT_JAX_START_TIMEOUT seconds.
    """
    if jax.distributed.is_initialized():
        return
    arguments, seconds, raised = explicit(), timeout(), []
    if arguments.get("process_id") == 0 and (problem := not_listening(arguments["coordinator_address"])):
        raise UserError(
            f"process 0 can't listen on {arguments['coordinator_address']} ({problem}): choose a free port in "
            f"{COORDINATOR}"
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
            f"this process can't join the others of its job ({one_line(raised[0])[:300]}): correct the environment "
            f"(a free port, the variables of the cluster), or set {', '.join(VARIABLES)} in each process"
        ) from raised[0]
    joined.set()
    if several():
        threading.Thread(target=watch, daemon=True).start()


def explicit() -> dict:
    """Arguments of `jax.distributed.initialize` from VIT_JAX_*; none where the environment has none of them.

    Raises:
      UserError: some are missing, or no numbers.
    """
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not values:
        return {}
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        values.setdefault(COORDINATOR, address)
    if missing := [name for name in VARIABLES if name not in values]:
        raise UserError(f"{', '.join(missing)} not set in the environment: set all of {', '.join(VARIABLES)}")
    try:
        count, index = int(values[COUNT]), int(values[INDEX])
    except ValueError:
        raise UserError(f"{COUNT} and {INDEX} in the environment must be whole numbers: correct them") from None
    if not 0 <= index < count:
        raise UserError(f"{INDEX}={index} is not below {COUNT}={count} in the environment: correct them")
    address = values[COORDINATOR]
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise UserError(f"{COORDINATOR}={address} in the environment is no HOST:PORT: give host and port of process 0")
    return dict(
        coordinator_address=address, num_processes=count, process_id=index, cluster_detection_method="deactivate"
    )


def timeout() -> int:
    text = os.environ.get(TIMEOUT, "300")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{TIMEOUT}={text} in the environment is no number of seconds: give a whole one above 0")
    return int(text)


def is_alone(error: Exception, arguments: dict) -> bool:
    """Whether JAX failed to join because there is nothing to join."""
    nothing_found = "coordinator_address should be defined" in str(error)
    computes_already = "must be called before" in str(error)  # such as a notebook
    return not arguments and (nothing_found or computes_already)


def not_joined(seconds: int) -> str:
    """The error of a process that waited `seconds` in vain."""
    address, index, count = global_state.coordinator_address, global_state.process_id, global_state.num_processes
    longer = f"; {TIMEOUT}=SECONDS waits longer"
    if proxies := [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if name in os.environ]:
        longer += f"; {' and '.join(proxies)} of the environment may catch the connection: unset them"
    if address is None:
        return (
            f"the cluster that JAX detects did not say within {seconds} s who leads: see that its metadata can be "
            f"read, or set {', '.join(VARIABLES)}{longer}"
        )
    if index == 0:
        return (
            f"not all {count} processes joined process 0 at {address} within {seconds} s: see that all were started, "
            f"reach this address, and have the same number of processes{longer}"
        )
    if problem := unreachable(address):
        return (
            f"process {index} can't reach the coordinator, process 0 at {address}, within {seconds} s ({problem}): "
            f"start process 0 there, open the port, or correct {COORDINATOR}{longer}"
        )
    return (
        f"process {index} of {count} reached {address}, but the job was not complete within {seconds} s: see that all "
        f"{count} processes were started and that process 0, and no other program, listens there{longer}"
    )


def not_listening(address: str) -> str | None:
    """Why this process can't listen on the port of "host:port", or None where it can. JAX at times crashes over it."""
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


# --- doing the same ---------------------------------------------------------------------------------------------------


def agree(facts: Mapping[str, object], folder: epath.Path | None = None) -> None:
    """Makes sure, once at the start, that all processes do the same; does nothing in a single one.

    Args:
      facts: what must be the same everywhere: a config by key, fingerprints. Keys of the machine are left out.
      folder: exists, and must be one folder for all, not one of this name on each host.

    Raises:
      UserError: on all processes, if one differs; it names the process and the facts.
    """
    if jax.process_count() == 1:
        return
    index, address = jax.process_index(), global_state.coordinator_address
    devices = f"{jax.local_device_count()} local devices of {jax.device_count()}"
    log.info("process %d of %d, led by process 0 at %s, %s", index, jax.process_count(), address, devices)
    same = {key: repr(facts[key]) for key in sorted(facts) if not OF_THE_MACHINE.fullmatch(key)}
    if folder is None:
        meet(timeout())
        return compare(same)
    mark = folder / f".led_by_{re.sub('[^a-zA-Z0-9]', '_', address)}"
    if index == 0:
        mark.write_text(str(time.time_ns()))
    try:
        meet(timeout())
        compare(same | {"--workdir": mark.read_text() if mark.exists() else f"{folder} of this host alone"})
    finally:
        if index == 0:
            mark.unlink()


def compare(facts: dict[str, str]) -> None:
    """Raises UserError on all processes, if one has other facts."""
    text = json.dumps(facts).encode()
    digests = gather(hashlib.sha256(text).digest() + len(text).to_bytes(8, "big"))
    if len(set(digests)) == 1:
        return
    longest = max(int.from_bytes(digest[-8:], "big") for digest in digests)
    all_facts = [json.loads(other) for other in gather(text.ljust(longest))]
    index = next(i for i, other in enumerate(all_facts) if other != all_facts[0])
    raise UserError(
        f"process {index} does not do what process 0 does ({differences(all_facts[0], all_facts[index])}): start all "
        "processes with the same command, code and data"
    )


def meet(seconds: int) -> None:
    """Returns when all processes are here.

    Raises:
      UserError: not all came within `seconds`.
    """
    try:
        global_state.client.wait_at_barrier("vit_jax/agree", 1000 * seconds)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"not all processes were ready to start within {seconds} s of process {jax.process_index()}: see what the "
            f"others say; {TIMEOUT}=SECONDS waits longer"
        ) from error


def gather(local: bytes) -> list[bytes]:
    """The bytes of every process, which must be equally many, by process."""
    from jax.experimental import multihost_utils

    return [row.tobytes() for row in multihost_utils.process_allgather(np.frombuffer(local, np.uint8))]


def differences(one: Mapping[str, str], two: Mapping[str, str]) -> str:
    keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    return "; ".join(f"{key}: {one.get(key, '(unset)')} -> {two.get(key, '(unset)')}" for key in keys)


# --- ending together --------------------------------------------------------------------------------------------------


def run(main: Callable[[], None], debug: bool) -> int:
    """`errors.run` for a command of several processes: one that fails tells the others and leaves without them.

    In good order it would wait for them, and they for the result of a computation that it no longer takes part in.
    """

    def telling():
        try:
            main()
        except errors.Preempted:  # all stop at one step
            raise
        except BaseException as error:
            tell(error)
            raise

    try:
        code = errors.run(telling, debug)
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        if word := told():  # what failed here is what the other one was needed for
            code = repeat(word)
        else:
            traceback.print_exc()
            code = 1
    if code not in (0, errors.Preempted.exit_code) and jax.distributed.is_initialized():
        leave(code)
    return code


def several() -> bool:
    """Whether this process joined others; asks no devices, which may be lost."""
    return joined.is_set() and global_state.client is not None and global_state.num_processes > 1


def tell(error: BaseException) -> None:
    """Says to the other processes that this one ends."""
    if not several():
        return
    code = getattr(error, "exit_code", UserError.exit_code if errors.storage_problem(error) else 1)
    word = dict(process=global_state.process_id, code=code, error=one_line(error)[:1000] or type(error).__name__)
    try:
        global_state.client.key_value_set(FAILURE, json.dumps(word))
    except Exception as problem:  # another was first, or process 0 is gone
        log.debug("not told: %s", problem)


def told() -> dict | None:
    """What another process said with `tell`, if one did."""
    try:
        word = json.loads(global_state.client.key_value_try_get(FAILURE)) if several() else None
    except Exception:  # nothing was said, or process 0 is gone
        return None
    return word if word and word["process"] != global_state.process_id else None


def repeat(word: dict) -> int:
    """Says why this process ends, too, on stderr and in its log; returns the exit code."""
    line = f"process {word['process']} of the job stopped: {word['error']}"
    print(f"error: {line}", file=sys.stderr)
    if log.hasHandlers():
        log.error(line, extra=dict(file_only=True))
    return word["code"]


def watch() -> None:
    """Ends this process soon after another has said that it failed."""
    while not (word := told()):
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # where all fail alike, each may say so itself
    if several():
        leave(repeat(word))


def leave(code: int) -> None:
    """Ends this process with `code` and without waiting for the others, process 0 last."""
    waits = several() and global_state.process_id == 0
    joined.clear()  # nothing more is told or repeated
    if waits:
        time.sleep(LINGER_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
