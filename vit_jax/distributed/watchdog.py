"""How the processes of a job end together: one that fails, is gone or stands still ends all, and it
is said which.
"""

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
from jax._src.distributed import global_state  # nothing public passes a word without the devices

from vit_jax import cli, errors
from vit_jax.distributed import messages, processes
from vit_jax.distributed.messages import is_multiprocess
from vit_jax.errors import NegativeResult, UserError, one_line

log = logging.getLogger(__name__)

# A process that ends by an error of its own says so, which is read every POLL_S; process 0 leaves
# LINGER_S later than the others, because its end is theirs. Where a computation fails because one
# is gone, the roll is called for PING_S.
POLL_S, LINGER_S, PING_S = 2, 6, 5
FAILURE, PROGRESS, PING = "vit_jax/failure", "vit_jax/progress", "vit_jax/ping"
STALL = "VIT_JAX_STALL_TIMEOUT"
# How computations fail whose partner is gone: on CPUs, GPUs, TPUs.
LOST = re.compile("Gloo|NCCL|UNAVAILABLE|[Cc]onnection (reset|closed|refused)|peer")


class Progress:
    """Where this process is in the run: how many things it has begun, as all processes do alike,
    and since when.
    """

    count, what, since = 0, "", 0.0

    def mark(self, what: str) -> None:
        self.since, self.what = time.monotonic(), what
        self.count += 1

    def write(self) -> None:
        text = json.dumps([self.count, self.what])
        global_state.client.key_value_set(
            f"{PROGRESS}/{global_state.process_id}", text, allow_overwrite=True
        )


progress = Progress()  # of this process


def each(items: Iterable, what: str) -> Iterator:
    """Yields the items; this process is at `what` with each of them."""
    for item in items:
        progress.mark(what)
        yield item


def stall_timeout() -> int:
    """Seconds without progress after which a job of several processes ends.

    Raises:
      UserError: the variable is no such number.
    """
    text = os.environ.get(STALL, "2400")  # longer than what waits on its own, see PATIENCE_S
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{STALL}={text} in the environment is no number of seconds: give a whole one above 0"
        )
    return int(text)


def run(main: Callable[[], None], debug: bool, recovery: str = "") -> int:
    """`cli.run` for a command of several processes: one that fails tells the others and leaves
    without them.

    In good order it would wait for them, and they for the result of a computation that it no longer
    takes part in.
    """

    def reporting():
        try:
            with watching(stall_timeout()):
                main()
        except errors.Preempted:  # all stop at one step
            raise
        except BaseException as error:
            gone = find_dead_processes(error)
            report_failure(gone or error)
            if gone:
                raise gone from error
            raise

    try:
        code = cli.run(reporting, debug, recovery)
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        if word := read_failure():  # what failed here is what the other one was needed for
            code = log_failure(word)
        else:
            traceback.print_exc()
            code = 1
    if code not in (0, errors.Preempted.exit_code) and jax.distributed.is_initialized():
        exit_now(code)
    return code


def find_dead_processes(error: BaseException) -> UserError | None:
    """What to say where a computation failed because processes are gone: they don't answer when the
    roll is called.
    """
    if not is_multiprocess() or not LOST.search(str(error)) or read_failure():
        return None
    try:
        global_state.client.key_value_set(f"{PING}/called", "", allow_overwrite=True)
        time.sleep(PING_S)
        answered = {
            name.rsplit("/", 1)[1] for name, _ in global_state.client.key_value_dir_get(PING)
        }
    except jax.errors.JaxRuntimeError:  # process 0 is gone, and so is this one soon
        return None
    missing = [i for i in range(global_state.num_processes) if str(i) not in answered]
    if not missing or read_failure():
        return None
    return NegativeResult(
        f"process {', '.join(map(str, missing))} of {global_state.num_processes} is gone "
        f"({one_line(error)[:160]}): see its log; the same command continues from the last "
        "checkpoint"
    )


def report_failure(error: BaseException) -> None:
    """Says to the other processes that this one ends."""
    if not is_multiprocess():
        return
    code = getattr(error, "exit_code", UserError.exit_code if errors.storage_problem(error) else 1)
    word = dict(
        process=global_state.process_id,
        code=code,
        error=one_line(error)[:1000] or type(error).__name__,
    )
    try:
        global_state.client.key_value_set(FAILURE, json.dumps(word))
    except Exception as problem:  # another was first, or process 0 is gone
        log.debug("not read_failure: %s", problem)


def read_failure() -> dict | None:
    """What another process said with `report_failure`, if one did."""
    try:
        word = (
            json.loads(global_state.client.key_value_try_get(FAILURE))
            if is_multiprocess()
            else None
        )
    except Exception:  # nothing was said, or process 0 is gone
        return None
    return word if word and word["process"] != global_state.process_id else None


def log_failure(word: dict) -> int:
    """Says why this process ends, too, on stderr and in its log; returns the exit code."""
    line = f"process {word['process']} of the job stopped: {word['error']}"
    print(f"error: {line}", file=sys.stderr)
    if log.hasHandlers():
        log.error(line, extra=dict(file_only=True))
    return word["code"]


@contextlib.contextmanager
def watching(stall_s: int) -> Iterator[None]:
    """Watches the others until all are done with the body; after an error for as long as this
    process lives.

    The thread has to end before the interpreter does, which would kill it: inside JAX that aborts
      the whole process.
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
    except errors.Preempted:  # all stop at one step
        end()
        raise
    end()


def watch(stall_s: int, over: threading.Event) -> None:
    """Ends this process soon after another has said that it failed, or when the job stands still."""
    messages.joined.wait()
    word, written = None, 0
    while is_multiprocess() and not over.is_set() and not (word := read_failure()):
        with contextlib.suppress(
            jax.errors.JaxRuntimeError
        ):  # process 0 is gone, and so is this one soon
            if progress.count > written:
                written = progress.count
                progress.write()
            respond_to_ping()
            if progress.count and time.monotonic() - progress.since > stall_s:
                word = dict(process=global_state.process_id, code=1, error=stalled(stall_s))
                report_failure(NegativeResult(word["error"]))
                break
        over.wait(POLL_S)
    if word is None:
        return
    time.sleep(POLL_S)  # where all fail alike, each may say so itself
    if is_multiprocess():
        exit_now(log_failure(word))


def respond_to_ping() -> None:
    """Says that this process lives, where one asks; its computation may wait for ever."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody asks
        global_state.client.key_value_try_get(f"{PING}/called")
        global_state.client.key_value_set(
            f"{PING}/{global_state.process_id}", "", allow_overwrite=True
        )


def stalled(seconds: int) -> str:
    """Who keeps the others waiting."""
    positions = {i: [0, "its start"] for i in range(global_state.num_processes)}
    for name, text in global_state.client.key_value_dir_get(PROGRESS):
        positions[int(name.rsplit("/", 1)[1])] = json.loads(text)
    last, first = min(positions.values()), max(positions.values())
    behind = [i for i, at in positions.items() if at[0] == last[0]]
    if last[0] == first[0]:
        where = f"all processes stand at {last[1]}"
    else:
        where = f"process {', '.join(map(str, behind))} stands at {last[1]}, the others wait for it at {first[1]}"
    return f"the job has not moved for {seconds} s, {where}: see what it waits for; {STALL}=SECONDS waits longer"


def exit_now(code: int) -> None:
    """Ends this process with `code` and without waiting for the others, process 0 last."""
    waits = is_multiprocess() and global_state.process_id == 0
    messages.joined.clear()  # nothing more is read_failure or repeated
    if waits:
        time.sleep(LINGER_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
