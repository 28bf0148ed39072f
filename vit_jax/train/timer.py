"""How fast training is, and a window of the profiler."""

import array
import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError


def timed(function: Callable, *args) -> tuple[Any, float]:
    """Calls `function` and returns its result and the seconds that the call took."""
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def hbm_gib() -> dict[str, float]:
    """{"perf/hbm_gib": peak memory of the fullest local device}, or {} if the backend has none."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one.get("peak_bytes_in_use", one.get("bytes_in_use", 0)) for one in stats]
    return {"perf/hbm_gib": max(peaks) / 2**30} if any(peaks) else {}


class Span:
    """Steps of a stretch of training, without the time of what `StepTimer.paused` measures."""

    def __init__(self):
        self.steps = 0
        self.seconds = 0.0
        self.waited = 0.0  # seconds, for batches
        self.step_s = array.array("d")  # seconds of each step

    def add(self, other: "Span") -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.waited += other.waited
        self.step_s.extend(other.step_s)


class StepTimer:
    """How fast the steps are, since the last report and in total.

    Steps are dispatched ahead of the device, so the time between two dispatches says little. After
    each dispatch the timer waits for the metrics of the step before last: the device has a step to
    do meanwhile, and these waits end as far apart as steps do, or as far as the host needs if it is
    slower. That is not so while the queue fills and drains, around a report, an evaluation or a
    save; if nothing else was measured, steps count as equally long.
    """

    AHEAD = 2  # steps that are dispatched and not waited for

    def __init__(
        self, batch_size: int, train_flops: float, peak_flops: float | None, num_devices: int
    ):
        """
        Args:
          train_flops: forward and backward FLOPs of one image.
          peak_flops: of one device, or None if unknown.
        """
        self.batch_size = batch_size
        self.train_flops = train_flops
        self.peak_flops = peak_flops
        self.num_devices = num_devices
        self.since_report = Span()
        self.in_total = Span()
        self.paused_s: dict[str, float] = {}
        self.running: collections.deque = collections.deque()
        self.compile_s = None
        self.compile_reported = False
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
        span = self.since_report
        equal = self.steps * [seconds / max(self.steps, 1)]
        span.step_s.extend(np.diff(self.ends) if len(self.ends) > 1 else equal)
        span.steps += self.steps
        span.seconds += seconds

    def resume(self) -> None:
        """Begins a stretch of steps."""
        self.resumed = time.perf_counter()
        self.steps = 0
        self.ends = array.array("d")

    @contextlib.contextmanager
    def paused(self, what: str):
        """Measures something other than steps, such as an evaluation."""
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
        self.in_total.add(self.since_report)
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
        """Metrics of all steps; `steps`; `seconds` since the start; `paused`, seconds by name."""
        totals = self.report() | self.speed(self.in_total)
        if self.compile_s is not None:
            totals["perf/compile_s"] = self.compile_s
        totals["steps"] = self.in_total.steps
        totals["seconds"] = time.perf_counter() - self.begun
        totals["paused"] = self.paused_s
        return totals


class ProfilerWindow:
    """Traces `num_steps` steps from `first_step` on into `folder`; num_steps 0 is off.

    Calls of Python are not traced: JAX's hook in every thread has crashed runs as the trace ended,
    and slows the steps that are measured.
    """

    def __init__(self, folder, first_step: int, num_steps: int):
        self.folder = str(folder)
        self.first = max(first_step, 1)
        self.last = self.first + num_steps
        self.running = False
        if num_steps and folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, and a profile needs a folder there: rename it")

    def before_step(self, step: int) -> None:
        """`step`: the update about to be done, counted from 1."""
        if not self.running and self.first <= step < self.last:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
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
