"""Short messages between the processes of one job, which take no devices."""

import collections
import contextlib
import itertools
import threading
import time

import jax
from jax._src.distributed import global_state  # nothing public passes a word without the devices

from vit_jax.errors import UserError

TIMEOUT = "VIT_JAX_START_TIMEOUT"
# For what takes long on one process and not on another, as reading a checkpoint. A dead one is
# noticed before.
PATIENCE_S = 1800
BARRIER_POLL_S = 0.1  # between two looks at who is there

# How often this process exchanged words and met others; all count alike.
exchanges, gather_ids, barriers = itertools.count(), itertools.count(), collections.Counter()
joined = threading.Event()  # JAX says that it is initialised before all are there


def is_multiprocess() -> bool:
    """Whether this process joined others; asks no devices, which may be lost."""
    return joined.is_set() and global_state.client is not None and global_state.num_processes > 1


def leader_address() -> str:
    """Host and port of process 0."""
    return global_state.coordinator_address


def first_problem(what: str, problem: str | None) -> str | None:
    """What the first process has to say that has a problem, the same on all; None where there is
    none.
    """
    if not is_multiprocess():
        return problem
    said = all_gather(what, problem or "", PATIENCE_S)
    return next((f"process {i}: {text}" for i, text in enumerate(said) if text), None)


def all_gather(what: str, text: str, seconds: int) -> list[str]:
    """What every process says, by process; all must call it, in the same order. It takes no
    devices.

    Raises:
      UserError: not all said it within `seconds`; the error names those who did not.
    """
    if not is_multiprocess():
        return [text]
    client, number, own = global_state.client, next(exchanges), global_state.process_id
    said = post(f"vit_jax/{number}", text, seconds)
    if len(said) == global_state.num_processes:
        client.key_value_delete(f"vit_jax/{number - 1}/{own}")  # all have read it: they are here
        return [said[i] for i in range(global_state.num_processes)]
    missing = ", ".join(str(i) for i in range(global_state.num_processes) if i not in said)
    raise UserError(
        f"process {missing} of {global_state.num_processes} did not come to {what} within "
        f"{seconds} s: see what they say; at the start, {TIMEOUT}=SECONDS waits longer"
    )


def gather(what: str, text: str, seconds: int) -> list[str] | None:
    """Like `all_gather`, where process 0 alone gets what all say, and the others None: for what is
    long.
    """
    if not is_multiprocess():
        return [text]
    key = f"vit_jax/leader/{next(gather_ids)}"
    global_state.client.key_value_set(f"{key}/{global_state.process_id}", f"={text}")
    all_gather(what, "", seconds)
    if global_state.process_id:
        return None
    found = {
        int(name.rsplit("/", 1)[1]): value[1:]
        for name, value in global_state.client.key_value_dir_get(key)
    }
    global_state.client.key_value_delete(key)
    return [found[i] for i in range(global_state.num_processes)]


def signal(key: str) -> None:
    """Sets a key for `barrier`."""
    if is_multiprocess():
        global_state.client.key_value_set(key, "", allow_overwrite=True)


def barrier(key: str, seconds: float, unless: str) -> None:
    """Waits for all processes at a key, which may be used again, as long as none of them has
    announced `unless`.

    Raises:
      RuntimeError: one has, or not all came within `seconds`.
    """
    if not is_multiprocess():
        return
    client, end, own, number = (
        global_state.client,
        time.monotonic() + seconds,
        global_state.process_id,
        barriers[key],
    )
    barriers[key] += 1
    here = f"vit_jax/meet/{key}/{number}"
    client.key_value_set(f"{here}/{own}", "")
    while len(client.key_value_dir_get(here)) < global_state.num_processes:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has announced it
            client.key_value_try_get(unless)
            raise RuntimeError("another process failed")
        if time.monotonic() > end:
            raise RuntimeError(f"not all processes came to {key} within {seconds:.0f} s")
        time.sleep(BARRIER_POLL_S)
    client.key_value_delete(
        f"vit_jax/meet/{key}/{number - 1}/{own}"
    )  # nobody looks there any more: all are here


def post(key: str, text: str, seconds: int) -> dict[int, str]:
    """What the processes say under a key, which is used once, by process; those that come too late
    are left out.
    """
    client = global_state.client
    client.key_value_set(f"{key}/{global_state.process_id}", f"={text}")
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all came
        client.wait_at_barrier(key, 1000 * seconds)
    return {int(name.rsplit("/", 1)[1]): value[1:] for name, value in client.key_value_dir_get(key)}
