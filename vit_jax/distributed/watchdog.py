"""How the processes of a job end together: if one fails, dies or stalls, all end and say which."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import jax
from jax._src.distributed import global_state  # no public API exposes the key-value store

from vit_jax import cli, errors
from vit_jax.cli import lock
from vit_jax.distributed import messages, processes
from vit_jax.distributed.messages import is_multiprocess
from vit_jax.distributed.waits import STALL_TIMEOUT, ongoing, stall_timeout
from vit_jax.errors import Unavailable, UserError, one_line, printable

log = logging.getLogger(__name__)

# Keys of messages.
FAILURE = "vit_jax/failure"  # of the first process that failed, as `report_failure` writes it
PROGRESS = "vit_jax/progress"
PING = "vit_jax/ping"

POLL_S = 2  # how often a process looks for a failure of another one
LINGER_S = 6  # process 0 ends this much later than the others: when it ends, JAX ends them
PING_S = 5  # how long processes have to answer before they count as dead
GRACE_S = 30  # for a wait that is too long to end by itself
# In the errors of computations whose partner died, on CPUs, GPUs and TPUs.
LOST = re.compile("Gloo|NCCL|UNAVAILABLE|[Cc]onnection (reset|closed|refused)|peer")


class Progress:
    """Where this process is in the run: the number of steps and other tasks that it has begun,
    which all processes begin in the same order, and the last of them.
    """

    count = 0
    what = "the start"
    since = 0.0

    def mark(self, what: str) -> None:
        self.since = time.monotonic()
        self.what = what
        self.count += 1

    def post(self) -> None:
        text = json.dumps([self.count, self.what])
        key = f"{PROGRESS}/{global_state.process_id}"
        global_state.client.key_value_set(key, text, allow_overwrite=True)


progress = Progress()  # of this process


def each(items: Iterable, what: str) -> Iterator:
    """Yields the items and marks progress at each of them."""
    for item in items:
        progress.mark(what)
        yield item


def run(main: Callable[[], None], debug: bool, recovery: str = "") -> int:
    """`cli.run` for a command of several processes: one that fails tells the others, and all end.

    It does not shut JAX down, which would wait for the others, while they wait for a computation
    that this process no longer takes part in.
    """
    try:
        code = cli.run(lambda: run_watched(main), debug, recovery)
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        code = log_exception()
    failed = code not in (0, errors.Preempted.exit_code)
    if ongoing.was_abandoned or (failed and jax.distributed.is_initialized()):
        exit_now(code)
    return code


def run_watched(main: Callable[[], None]) -> None:
    """Runs `main`, watched by a thread, and reports the error with which it fails."""
    try:
        with watching(stall_timeout()), speaking():
            main()
    except errors.Preempted:  # all processes stop at the same step
        raise
    except BaseException as error:
        cause = find_dead_processes(error)
        report_failure(cause or error)
        if cause:
            raise cause from error
        raise


def log_exception() -> int:
    """Prints why this process ends with an exception; returns the exit code."""
    failure = read_failure()
    if failure:  # this process failed because it needed the other one
        return log_failure(failure)
    traceback.print_exc()
    return 1


def find_dead_processes(error: BaseException) -> UserError | None:
    """The error that names dead processes, if a computation failed with `error` because of them."""
    if not is_multiprocess() or not LOST.search(str(error)) or read_failure():
        return None
    client = global_state.client
    try:
        client.key_value_set(f"{PING}/called", "", allow_overwrite=True)
        time.sleep(PING_S)
        answers = {name.rsplit("/", 1)[1] for name, _ in client.key_value_dir_get(PING)}
    except jax.errors.JaxRuntimeError:  # process 0 died: JAX will end this one
        return None
    count = global_state.num_processes
    missing = [str(i) for i in range(count) if str(i) not in answers]
    if not missing or read_failure():
        return None
    return Unavailable(
        f"process {', '.join(missing)} of {count} died or can't be reached "
        f"({one_line(error)[:160]}): see its log; the same command continues from the last "
        "checkpoint"
    )


def report_failure(error: BaseException) -> None:
    """Tells the other processes that this one ends with `error`."""
    if not is_multiprocess():
        return
    try:
        global_state.client.key_value_set(FAILURE, json.dumps(failure_of(error)))
    except Exception as problem:  # another process was first, or process 0 died
        log.debug("failure not reported: %s", problem)


def failure_of(error: BaseException) -> dict:
    """This process, its exit code, and why it ends."""
    code = UserError.exit_code if errors.storage_problem(error) else 1
    return dict(
        process=global_state.process_id,
        code=getattr(error, "exit_code", code),
        error=printable(one_line(error))[:1000] or type(error).__name__,
    )


def read_failure() -> dict | None:
    """What another process wrote with `report_failure`, if one did."""
    if not is_multiprocess():
        return None
    try:
        failure = json.loads(global_state.client.key_value_try_get(FAILURE))
    except Exception:  # no process failed, or process 0 died
        return None
    if failure["process"] == global_state.process_id:
        return None
    return failure


def log_failure(failure: dict) -> int:
    """Says on stderr and in the log which process failed; returns its exit code."""
    line = f"process {failure['process']} of the job stopped: {failure['error']}"
    print(f"error: {printable(line)}", file=sys.stderr)
    if log.hasHandlers():
        log.error(line, extra=dict(file_only=True))
    return failure["code"]


@contextlib.contextmanager
def watching(stall_s: int) -> Iterator[None]:
    """Watches the other processes until all have left the body; after an error, until this process
    ends.

    The thread must end before the interpreter does: killed inside JAX, it would abort the process.
    """
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(stall_s, over), daemon=True)

    def end():
        if is_multiprocess():
            progress.mark("the end")
            messages.all_gather("the end", "", processes.SHUTDOWN_S)
            over.set()
            watcher.join()

    watcher.start()
    try:
        yield
    except errors.Preempted:  # all processes stop at the same step
        end()
        raise
    end()


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Says what the main thread waits for, if that takes long."""
    over = threading.Event()
    threading.Thread(target=speak_of_waits, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def speak_of_waits(over: threading.Event) -> None:
    """Logs long waits, and ends this process if one hangs in a library and can't end by itself."""
    while not over.wait(POLL_S):
        wait = ongoing.current
        if wait is None:
            continue
        wait.speak()
        if wait.seconds > stall_timeout() + GRACE_S:
            error = wait.too_long()
            report_failure(error)
            print(f"error: {printable(one_line(error))}", file=sys.stderr)
            exit_now(error.exit_code)


def watch(stall_s: int, over: threading.Event) -> None:
    """Ends this process soon after another one has failed, or when the job stalls."""
    messages.joined.wait()
    failure = wait_for_failure(stall_s, over)
    if failure is None:
        return
    time.sleep(POLL_S)  # if all processes fail alike, each may report its own error
    if is_multiprocess():
        exit_now(log_failure(failure))


def wait_for_failure(stall_s: int, over: threading.Event) -> dict | None:
    """The failure of another process or a stall of the job; None once the job is over."""
    posted = 0
    while is_multiprocess() and not over.is_set():
        failure = read_failure()
        if failure:
            return failure
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 died: JAX ends this one
            if progress.count > posted:
                posted = progress.count
                progress.post()
            respond_to_ping()
            if progress.count and time.monotonic() - progress.since > stall_s:
                error = Unavailable(describe_stall(stall_s))
                report_failure(error)
                return failure_of(error)
        over.wait(POLL_S)
    return None


def respond_to_ping() -> None:
    """Shows that this process lives, if one asks; its computation may wait for ever."""
    client = global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # none asks
        client.key_value_try_get(f"{PING}/called")
        client.key_value_set(f"{PING}/{global_state.process_id}", "", allow_overwrite=True)


def describe_stall(seconds: int) -> str:
    """Which processes keep the others waiting, and where they are."""
    positions = {i: [0, "the start"] for i in range(global_state.num_processes)}
    for name, text in global_state.client.key_value_dir_get(PROGRESS):
        positions[int(name.rsplit("/", 1)[1])] = json.loads(text)
    last = min(positions.values())
    first = max(positions.values())
    behind = [str(i) for i, position in positions.items() if position[0] == last[0]]
    if last[0] == first[0]:
        where = f"all processes are at {last[1]}"
    else:
        where = f"process {', '.join(behind)} is at {last[1]}, the others wait at {first[1]}"
    return (
        f"the job made no progress for {seconds} s ({where}): find out what it waits for; to wait "
        f"longer, set {STALL_TIMEOUT}=SECONDS"
    )


def exit_now(code: int) -> None:
    """Ends this process with `code` without waiting for the others, process 0 last."""
    is_leader = is_multiprocess() and global_state.process_id == 0
    messages.joined.clear()  # the watching thread ends, and no further failure is logged
    if is_leader:
        time.sleep(LINGER_S)
    lock.release_all()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
