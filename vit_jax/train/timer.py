"""How much work a model is, how fast it goes, and a profiler window."""

import array
import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def timed(function: Callable, *args) -> tuple[Any, float]:
    """Calls `function` and returns its result and the seconds that the call took."""
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def hbm_gib() -> dict[str, float]:
    """ "perf/hbm_gib", the peak of memory on the fullest local device, where the backend tells it."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    peaks = [stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)) for stats in found]
    return {"perf/hbm_gib": max(peaks) / 2**30} if any(peaks) else {}


class Span:
    """What the steps of a stretch of training took. Seconds are of training alone, without what
    `paused` times.
    """

    def __init__(self):
        self.steps, self.seconds, self.waited, self.step_s = 0, 0.0, 0.0, array.array("d")

    def add(self, other: "Span") -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.waited += other.waited
        self.step_s.extend(other.step_s)


class StepTimer:
    """How fast the steps are, since the last report and in all.

    Steps are dispatched ahead of the device, so that the time between two dispatches says little.
    After each dispatch
    the timer waits for the metrics of the step before last: the device has a step to do meanwhile,
    and the waits end as far apart as steps end, or as the host takes where it is the slower one.
    Where the queue fills and drains (around a report, an evaluation, a save) that is not so; a
    stretch without another measure counts as steps of equal length.
    """

    AHEAD = 2  # steps that are dispatched and not waited for

    def __init__(
        self, batch_size: int, train_flops: float, peak_flops: float | None, num_devices: int
    ):
        """`train_flops`: forward and backward FLOPs of one image; `peak_flops`: of one device, if
        known.
        """
        self.batch_size, self.train_flops, self.peak_flops = batch_size, train_flops, peak_flops
        self.num_devices = num_devices
        self.since_report, self.in_all, self.paused_s = Span(), Span(), {}
        self.running: collections.deque = collections.deque()
        self.compile_s, self.compile_reported = None, False
        self.begun = time.perf_counter()
        self.resume()

    def next_batch(self, batches):
        """Takes the next batch and counts the wait for it."""
        batch, seconds = timed(next, batches)
        self.since_report.waited += seconds
        return batch

    def step(self, train_step: Callable, state, batch) -> tuple[Any, dict]:
        """Calls `train_step`; the first call is counted as compilation, unless `compile_s` is set
        before.
        """
        (state, metrics), seconds = timed(train_step, state, batch)
        if self.compile_s is None:
            self.compile_s = seconds
            self.since_report.waited = 0.0
            self.resume()
        self.steps += 1
        self.running.append(metrics)
        if len(self.running) > self.AHEAD:
            jax.block_until_ready(self.running.popleft())
            self.ends.append(time.perf_counter())
        return state, metrics

    def pause(self) -> None:
        """Waits for all steps and stops the clock."""
        jax.block_until_ready(list(self.running))
        self.running.clear()
        seconds = time.perf_counter() - self.resumed
        span, step_s = self.since_report, np.diff(self.ends)
        span.step_s.extend(step_s if len(step_s) else self.steps * [seconds / max(self.steps, 1)])
        span.steps += self.steps
        span.seconds += seconds

    def resume(self) -> None:
        """Begins a stretch of steps."""
        self.resumed, self.steps = time.perf_counter(), 0
        self.ends = array.array("d")

    @contextlib.contextmanager
    def paused(self, what: str):
        """Times something that is no step, such as an evaluation."""
        self.pause()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.resume()
            self.paused_s[what] = self.paused_s.get(what, 0.0) + self.resumed - start

    def report(self) -> dict[str, float]:
        """Metrics of the steps since the last report; waits for them."""
        self.pause()
        scalars = self.speed(self.since_report) | hbm_gib()
        if self.compile_s is not None and not self.compile_reported:
            self.compile_reported = True
            scalars["perf/compile_s"] = self.compile_s
        self.in_all.add(self.since_report)
        self.since_report = Span()
        self.resume()
        return scalars

    def speed(self, span: Span) -> dict[str, float]:
        seconds = max(span.seconds, 1e-9)
        images = span.steps * self.batch_size / seconds
        scalars = {
            "perf/images_per_sec": images,
            "perf/images_per_sec_per_chip": images / self.num_devices,
            "perf/step_ms": 1e3 * seconds / max(span.steps, 1),
            "perf/data_wait": span.waited / seconds,
        }
        for percent in (50, 95) if span.step_s else ():
            scalars[f"perf/step_ms_p{percent}"] = 1e3 * float(np.percentile(span.step_s, percent))
        if self.peak_flops:
            scalars["perf/mfu"] = images * self.train_flops / (self.peak_flops * self.num_devices)
        return scalars

    def totals(self) -> dict:
        """Metrics of all steps, and `steps`, `seconds` since the start, and `paused`: seconds by
        what was timed.
        """
        last = self.report()
        compiled = {} if self.compile_s is None else {"perf/compile_s": self.compile_s}
        found = last | self.speed(self.in_all) | compiled
        return found | dict(
            steps=self.in_all.steps, seconds=time.perf_counter() - self.begun, paused=self.paused_s
        )


class ProfilerWindow:
    """Traces `num_steps` steps from `first_step` on into `folder`; num_steps 0 is off."""

    def __init__(self, folder, first_step: int, num_steps: int):
        self.folder, self.first, self.last, self.running = (
            str(folder),
            first_step,
            first_step + num_steps,
            False,
        )

    def before_step(self, step: int) -> None:
        """`step`: the update about to be done, counted from 1."""
        if not self.running and self.first <= step < self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True
        elif self.running and step >= self.last:
            self.stop()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def stop(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
