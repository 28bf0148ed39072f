"""Where the wall time of a run goes, over all its starts: goodput.json.

Every moment of a start counts for exactly one part, and the time between two starts is down time.
So the parts add up to the time from the beginning of the first start to the end of the last one.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterator

from etils import epath

from vit_jax import cli
from vit_jax.errors import one_line, storage_problem

log = logging.getLogger(__name__)

FILE = "goodput.json"
# Unix time in seconds at which the machines of this start were requested, if a launcher says it.
REQUESTED_AT = "VIT_JAX_REQUESTED_AT"
REFRESH_S = 10.0  # what a kill can lose: it counts as down time

# Part -> what a table calls it. The last one is the time between starts.
PARTS = {
    "waiting": "waiting for resources",
    "startup": "start-up",
    "compilation": "compilation",
    "data_wait": "data wait",
    "steps": "steps",
    "repeated_steps": "steps done again",
    "evaluation": "evaluation",
    "saves": "saves",
    "down": "down between starts",
}
OF_A_START = tuple(PARTS)[:-1]


def process_age() -> float:
    """Seconds since this process began, before Python and its imports; 0 if the system is not
    Linux, so that start-up begins with the import of this module.
    """
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): seconds after boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (OSError, AttributeError):
        return 0.0


class Stopwatch:
    """Seconds by part; it counts for one part at a time."""

    def __init__(self, age: float = 0.0, requested_at: str = ""):
        """
        Args:
          age: seconds that have passed already.
          requested_at: value of VIT_JAX_REQUESTED_AT.
        """
        self.lock = threading.Lock()
        self.restart(age, requested_at)

    def restart(self, age: float = 0.0, requested_at: str = "") -> None:
        self.begun = time.time() - age  # on the clock of the host
        self.since = time.monotonic() - age
        self.requested_at = requested_at
        self.part = "startup"
        self.seconds = dict.fromkeys(OF_A_START, 0.0)

    def switch(self, part: str) -> str:
        """Counts for `part` from now on; returns the part before."""
        with self.lock:
            self.count()
            before = self.part
            self.part = part
            return before

    def count(self) -> None:
        now = time.monotonic()
        self.seconds[self.part] += max(0.0, now - self.since)
        self.since = now

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Counts for `part` inside of the context."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def read(self) -> dict[str, float]:
        """Seconds by part until now."""
        with self.lock:
            self.count()
            return dict(self.seconds)

    def count_queue(self, earliest: float) -> None:
        """Counts the time from the request for machines until the process began as waiting.

        Args:
          earliest: Unix time in seconds; what is before belongs to the starts before.
        """
        if not self.requested_at:
            return
        try:
            requested = float(self.requested_at)
        except ValueError:
            requested = math.nan
        if not math.isfinite(requested):
            log.warning(
                "%s=%s in the environment is not a Unix time in seconds: the wait for machines is "
                "not counted",
                REQUESTED_AT,
                self.requested_at,
            )
            return
        seconds = max(0.0, self.begun - max(requested, earliest))
        self.begun -= seconds
        self.seconds["waiting"] += seconds


# Of this process: from its beginning to the end of its first run, then to the end of the next one
# (`vit_jax.finetune` has several).
stopwatch = Stopwatch(process_age(), os.environ.get(REQUESTED_AT, ""))


# --- the records of all starts ---


def end(record: dict) -> float:
    """Unix time, in seconds, until which a start is known to have lived."""
    return record["begun"] + sum(record["parts"].values())


def totals(records: list[dict]) -> dict:
    """All starts of a run: `wall_s`, `parts` {name: seconds} that add up to it, the number of
    `starts`, `steps_repeated`, and `goodput`, the share of the steps that counted.
    """
    parts = {name: sum(record["parts"][name] for record in records) for name in OF_A_START}
    gaps = [later["begun"] - end(before) for before, later in itertools.pairwise(records)]
    parts["down"] = sum(max(0.0, gap) for gap in gaps)  # clocks of hosts differ
    return summed(parts, len(records), sum(record["steps_repeated"] for record in records))


def summed(parts: dict[str, float], starts: int, steps_repeated: int) -> dict:
    """The totals of these parts, in whole milliseconds."""
    parts = {name: round(seconds, 3) for name, seconds in parts.items()}
    wall_s = round(sum(parts.values()), 3)
    goodput = parts["steps"] / wall_s if wall_s else 0.0
    return dict(
        wall_s=wall_s, parts=parts, starts=starts, steps_repeated=steps_repeated, goodput=goodput
    )


def is_number(value) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12


def parse(text: str) -> list[dict]:
    """The records of a goodput.json.

    Raises:
      ValueError: it is damaged.
    """
    try:
        records = json.loads(text)["records"]
        for record in records:
            steps = [record[key] for key in ("first_step", "last_step", "steps_repeated")]
            numbers = [record["begun"], *steps, *record["parts"].values()]
            if record["parts"].keys() != set(OF_A_START) or not all(map(is_number, numbers)):
                raise ValueError("a start has other parts, or a value that is not a number")
            if any(len(pair) != 2 for pair in record.get("changed", {}).values()):
                raise ValueError("what a start has changed is not a dict of pairs")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return records


def set_aside(path: epath.Path, problem: str) -> None:
    free = cli.name_for_damaged(path)
    path.rename(free)
    log.warning(
        "%s is damaged (%s), and now called %s: time is counted afresh", path, problem, free.name
    )


# --- the account of one start ---


class Account:
    """Adds this start to goodput.json, and refreshes its record until the end: with `write`, and
    every REFRESH_S seconds in a thread. A file that can't be read or written never stops a run.
    """

    def __init__(self, path: epath.Path | None, stopwatch: Stopwatch = stopwatch):
        """`path`: of goodput.json; None: this process only counts, and another one writes."""
        self.path = path
        self.stopwatch = stopwatch
        self.spending = stopwatch.spending
        self.earlier = []  # records of the starts before
        self.first_step = 0
        self.last_step = 0
        self.furthest = 0  # step that this start or an earlier one is known to have done
        self.steps_repeated = 0
        self.changed = {}  # what differs from the start before, by `workdir.claim`
        self.writes = threading.Lock()
        self.is_written = True
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.refresh, daemon=True)

    def __enter__(self):
        if self.path is not None:
            self.earlier = self.read_earlier()
        reached = (record.get("furthest", record["last_step"]) for record in self.earlier)
        self.furthest = max(reached, default=0)
        self.stopwatch.count_queue(max(map(end, self.earlier), default=0.0))
        self.write()
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.over.set()
        self.thread.join()
        self.write()
        self.stopwatch.restart()

    def read_earlier(self) -> list[dict]:
        try:
            if not self.path.exists():
                return []
            text = self.path.read_text()
        except UnicodeDecodeError as error:
            return self.begin_afresh(error)
        except Exception as error:  # every store has errors of its own
            log.warning("%s can't be read (%s): time is not counted", self.path, one_line(error))
            self.path = None
            return []
        try:
            return parse(text)
        except ValueError as error:
            return self.begin_afresh(error)

    def begin_afresh(self, error: Exception) -> list[dict]:
        try:
            set_aside(self.path, one_line(error))
        except Exception as problem:
            log.warning(
                "%s is damaged and can't be renamed (%s): time is not counted",
                self.path,
                one_line(problem),
            )
            self.path = None
        return []

    @contextlib.contextmanager
    def steps(self, done: int) -> Iterator[None]:
        """The loop over steps, after `done` updates; what is left after it is to close files."""
        self.first_step = done
        self.stand_at(done)
        try:
            yield
        finally:
            self.stopwatch.switch("saves")

    def did_step(self, number: int) -> None:
        """`number` updates are done, and the next one begins."""
        if number <= self.furthest:
            self.steps_repeated += 1
        self.stand_at(number)

    def stand_at(self, number: int) -> None:
        """The same without an update: at the start, and after going back."""
        self.last_step = number
        self.furthest = max(self.furthest, number)
        self.stopwatch.switch("repeated_steps" if number < self.furthest else "steps")

    def record(self) -> dict:
        parts = {name: round(seconds, 3) for name, seconds in self.stopwatch.read().items()}
        return dict(
            begun=round(self.stopwatch.begun, 3),
            first_step=self.first_step,
            last_step=self.last_step,
            furthest=self.furthest,
            steps_repeated=self.steps_repeated,
            parts=parts,
            changed=self.changed,
        )

    def totals(self) -> dict:
        """See `totals`; {} if this process does not write."""
        return totals([*self.earlier, self.record()]) if self.path is not None else {}

    def refresh(self) -> None:
        while not self.over.wait(REFRESH_S):
            self.write()

    def write(self) -> None:
        """Writes what is known now."""
        if self.path is None:
            return
        with self.writes:
            records = [*self.earlier, self.record()]
            text = json.dumps(totals(records) | dict(records=records), indent=1)
            try:
                cli.replace_file(self.path, text + "\n")
                self.is_written = True
            except Exception as error:  # every store has errors of its own
                if self.is_written:
                    problem = storage_problem(error) or one_line(error)[:160]
                    log.warning("%s can't be written (%s): trying again", self.path, problem)
                self.is_written = False
