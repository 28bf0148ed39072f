"""Where the input pipeline spends its time, so that a run that waits for data can say what for."""

import contextlib
import threading
import time
from collections.abc import Iterator

LIMIT = 0.05  # share of the step time spent waiting that is worth a warning
ADVICE = {
    "read": "put the data on a faster disk, or prepare them as array_record (python -m vit_jax.data prepare)",
    "decode": "use more cores, or images shrunk by python -m vit_jax.data prepare --short_side",
    "transfer": "the link to the devices is the limit; a larger data.prefetch evens out bursts",
}


class Stages:
    """Seconds and images by stage since the last report: "read" by each thread, "decode" likewise,
    "transfer".
    """

    def __init__(self):
        self.lock, self.spent = threading.Lock(), {}
        self.begun, self.above = False, False

    def add(self, stage: str, seconds: float, images: int) -> None:
        with self.lock:
            before = self.spent.get(stage, (0.0, 0))
            self.spent[stage] = before[0] + seconds, before[1] + images

    @contextlib.contextmanager
    def time(self, stage: str, images: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start, images)

    def take(self) -> dict[str, float]:
        """Milliseconds per image by stage, counted anew from here on."""
        with self.lock:
            spent, self.spent = self.spent, {}
        return {
            stage: 1e3 * seconds / images for stage, (seconds, images) in spent.items() if images
        }

    def warning(self, data_wait: float, threads: int) -> str | None:
        """What to tell about a time of `data_wait` (share of the step time), once each time that it
        passes `LIMIT`.

        Call it for every line of metrics. The first is never told: it holds the start of the
        pipeline. After a warning the wait must fall to half the limit before there is another.
        """
        spent, begun, self.begun = self.take(), self.begun, True
        tell = begun and data_wait > LIMIT and not self.above
        self.above = tell or (self.above and data_wait > LIMIT / 2)
        if not tell or not spent:
            return None
        wall = {stage: ms / (1 if stage == "transfer" else threads) for stage, ms in spent.items()}
        slow = max(wall, key=wall.get)
        times = ", ".join(f"{stage} {ms:.2f}" for stage, ms in spent.items())
        return (
            f"{data_wait:.0%} of the time is spent waiting for data; the slow stage is {slow} (ms "
            f"per image: {times}; {threads} threads read and decode): {ADVICE[slow]}"
        )
