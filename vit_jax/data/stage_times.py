"""Where the input pipeline spends its time: lets a run that waits for data name the slow stage."""

import contextlib
import threading
import time
from collections.abc import Iterator

LIMIT = 0.05  # share of the step time spent waiting that is worth a warning
ADVICE = {
    "read": "put the data on a faster disk, or convert them to array_record (python -m "
    "vit_jax.data prepare)",
    "decode": "use more cores, or shrink the images with python -m vit_jax.data prepare "
    "--short_side",
    "transfer": "the link to the devices is the limit; a larger data.prefetch evens out bursts",
}


class StageTimes:
    """Seconds and images by stage since the last report.

    The stages are "read" and "decode", summed over threads, and "transfer".
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.spent = {}
        self.has_reported = False
        self.has_warned = False

    def add(self, stage: str, seconds: float, images: int) -> None:
        with self.lock:
            total_seconds, total_images = self.spent.get(stage, (0.0, 0))
            self.spent[stage] = (total_seconds + seconds, total_images + images)

    @contextlib.contextmanager
    def time(self, stage: str, images: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start, images)

    def take(self) -> dict[str, float]:
        """Milliseconds per image by stage; starts counting anew."""
        with self.lock:
            spent = self.spent
            self.spent = {}
        return {
            stage: 1e3 * seconds / images for stage, (seconds, images) in spent.items() if images
        }

    def warning(self, data_wait: float, threads: int) -> str | None:
        """A warning if `data_wait`, as a share of the step time, has risen above `LIMIT`.

        Call it for every line of metrics. The first gives no warning: it includes the start of the
        pipeline. After a warning, the wait must fall to half the limit before there is another.
        """
        spent = self.take()
        is_first = not self.has_reported
        self.has_reported = True
        if data_wait <= LIMIT / 2:
            self.has_warned = False
        if is_first or self.has_warned or data_wait <= LIMIT:
            return None
        self.has_warned = True
        if not spent:
            return None
        wall = {stage: ms / (1 if stage == "transfer" else threads) for stage, ms in spent.items()}
        slow = max(wall, key=wall.get)
        times = ", ".join(f"{stage} {ms:.2f}" for stage, ms in spent.items())
        return (
            f"{data_wait:.0%} of the time is spent waiting for data; the slow stage is {slow} (ms "
            f"per image: {times}; {threads} threads read and decode): {ADVICE[slow]}"
        )
