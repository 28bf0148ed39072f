"""Short texts that the processes of one job exchange through the coordinator, without devices."""

import collections
import contextlib
import itertools
import threading
import time

import jax
from jax._src.distributed import global_state  # no public API exposes the key-value store

from vit_jax.distributed import peers
from vit_jax.distributed.job import START_TIMEOUT
from vit_jax.errors import Unavailable

# For work that may take long on one process only, such as reading a checkpoint. A process that dies
# is noticed earlier.
PATIENCE_S = 1800
BARRIER_POLL_S = 0.1
LINE_S = 60  # between two lines about a wait, after the first

# Numbers of the calls so far. All processes make the same calls, so they count alike.
all_gather_ids = itertools.count()
gather_ids = itertools.count()
barrier_ids = collections.Counter()  # by key
joined = threading.Event()  # JAX reports that it is initialised before all processes have joined


def is_multiprocess() -> bool:
    """Whether this process joined others. Does not ask the devices, which may be lost."""
    return joined.is_set() and global_state.client is not None and global_state.num_processes > 1


def leader_address() -> str:
    """Host and port of process 0."""
    return global_state.coordinator_address


def first_problem(what: str, problem: str | None) -> str | None:
    """The problem of the lowest process that has one, the same on all processes; else None."""
    if not is_multiprocess():
        return problem
    problems = all_gather(what, problem or "", PATIENCE_S)
    return next((f"process {i}: {text}" for i, text in enumerate(problems) if text), None)


def all_gather(what: str, text: str, seconds: int) -> list[str]:
    """The texts of all processes, by process. All must call this, in the same order.

    `what` is the point in the run that they have reached, for the Unavailable that names those that
    do not come within `seconds`.
    """
    if not is_multiprocess():
        return [text]
    number = next(all_gather_ids)
    count = global_state.num_processes
    key = f"vit_jax/{number}"
    with peers.awaited(lambda: describe_wait(what, key, seconds), LINE_S):
        texts = post(key, text, seconds)
    missing = [i for i in range(count) if i not in texts]
    if missing:
        raise Unavailable(
            f"{peers.names(missing)} of {count} did not reach {what} within {seconds} s: see "
            f"the logs of all processes; to wait longer at the start, set {START_TIMEOUT}=SECONDS"
        )
    # All processes are here, so all have read the texts of the call before.
    global_state.client.key_value_delete(f"vit_jax/{number - 1}/{global_state.process_id}")
    return [texts[i] for i in range(count)]


def gather(what: str, text: str, seconds: int) -> list[str] | None:
    """Like `all_gather`, but only process 0 gets the texts and the others None: for long texts."""
    if not is_multiprocess():
        return [text]
    client = global_state.client
    key = f"vit_jax/gather/{next(gather_ids)}"
    client.key_value_set(f"{key}/{global_state.process_id}", text)
    all_gather(what, "", seconds)
    if global_state.process_id != 0:
        return None
    texts = by_process(key)
    client.key_value_delete(key)
    return [texts[i] for i in range(global_state.num_processes)]


def signal(key: str) -> None:
    """Ends the wait of every `barrier(..., unless=key)`."""
    if is_multiprocess():
        global_state.client.key_value_set(key, "", allow_overwrite=True)


def barrier(key: str, seconds: float, unless: str) -> None:
    """Waits until all processes have called this; a key may be used again.

    Raises:
      RuntimeError: a process called `signal(unless)`, or not all came within `seconds`.
    """
    if not is_multiprocess():
        return
    client = global_state.client
    process = global_state.process_id
    deadline = time.monotonic() + seconds
    number = barrier_ids[key]
    barrier_ids[key] += 1
    here = f"vit_jax/barrier/{key}/{number}"
    client.key_value_set(f"{here}/{process}", "")
    with peers.awaited(lambda: describe_wait(key, here, seconds), LINE_S):
        while len(client.key_value_dir_get(here)) < global_state.num_processes:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the key is not set
                client.key_value_try_get(unless)
                raise RuntimeError("another process failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all processes reached {key} within {seconds:.0f} s")
            time.sleep(BARRIER_POLL_S)
    # All processes are here, so none still polls the barrier before.
    client.key_value_delete(f"vit_jax/barrier/{key}/{number - 1}/{process}")


def post(key: str, text: str, seconds: int) -> dict[int, str]:
    """The texts that processes posted under a key within `seconds`; a key is used only once."""
    client = global_state.client
    client.key_value_set(f"{key}/{global_state.process_id}", text)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all came in time
        client.wait_at_barrier(key, 1000 * seconds)
    return by_process(key)


def describe_wait(what: str, key: str, seconds: float) -> str:
    """Which processes have not posted under `key` yet."""
    count = global_state.num_processes
    try:
        here = by_process(key)
    except jax.errors.JaxRuntimeError:  # process 0 is gone: JAX ends this one
        return f"waiting for {what}: process 0 does not answer"
    missing = [i for i in range(count) if i not in here]
    if not missing:
        return f"waiting for {what}: all {count} processes are here"
    return (
        f"waiting for {peers.names(missing)} of {count} to reach {what}, for up to {seconds:.0f} s"
    )


def by_process(key: str) -> dict[int, str]:
    """The texts under KEY/PROCESS."""
    found = global_state.client.key_value_dir_get(key)
    return {int(name.rsplit("/", 1)[1]): text for name, text in found}
