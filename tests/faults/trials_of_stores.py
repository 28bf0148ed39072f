"""Trials with a run on a store that fails in every way that its clients meet, and with kills."""

import dataclasses
import functools
import json
import pathlib
import random
import re
import signal
import time

from processes_at_hand import LightJob, Server, check, error_lines, expect, truth
from store.process import RunningStore

STEPS = 32
EVERY = 8
STARTS = 60  # in which a run must come to its end

# Name -> arguments of `Faults`. The numbers after @ are those of the requests.
FAULTS = {
    "429_burst": dict(rules="429_burst:0.04"),
    "503_burst": dict(rules="503_burst:0.04"),
    "503": dict(rules="503:0.05"),
    "reset": dict(rules="reset:0.05"),
    "stall": dict(rules="stall:0.02", stall_s=0.5),
    "truncated": dict(rules="truncated:0.05"),
    "checksum": dict(rules="checksum:0.05"),
    "missing": dict(rules="missing:0.02"),
    "refused": dict(rules="403:1@150-162,401:1@300-312,403:1@450-462,401:1@600-612"),
    "slow": dict(rules="slow:0.1", slow_s=0.3),
}
# Kinds that a reader can't tell from a checkpoint that is damaged: an older one may be used.
DAMAGE = ("checksum", "missing")


@functools.cache
def store_server() -> Server:
    # TensorFlow's client reads it when it is loaded, and then repeats without a pause.
    return Server("--serve_store", GCS_RETRY_CONFIG_INIT_DELAY_TIME_US="0")


@dataclasses.dataclass
class StoreJob(LightJob):
    """A light run whose checkpoints are on a store."""

    store: RunningStore | None = None

    def server(self, index: int) -> Server:
        return store_server()

    def variables(self) -> dict[str, str]:
        return self.store.environment

    def committed(self) -> list[int]:
        names = self.store.names("run/checkpoints/")
        marks = [re.fullmatch(r"run/checkpoints/(\d+)/commit_success.txt", name) for name in names]
        return sorted(int(mark[1]) for mark in marks if mark)


def run_once(job: StoreJob, kind: str, kill_after: int, rng: random.Random) -> tuple[int, str]:
    """One start, killed soon after so many steps: (exit code, stderr)."""
    committed = job.committed()
    job.start()
    if job.wait_for_steps(kill_after):
        time.sleep(rng.uniform(0, 0.5))
        job.server(0).kill()
    ((code, text),) = job.finish()
    expect("Traceback" not in text, text[-3000:])
    begun = [line["first"] for line in job.since_start() if "first" in line]
    if begun and kind not in DAMAGE:
        newest = (committed or [0])[-1]
        expect(begun[0] == newest, f"{committed} are committed, but it starts from {begun[0]}")
    return code, text


def check_lines(job: StoreJob, stderr: str) -> None:
    """The lines on the store have every step, with the loss that it had."""
    losses = {line["step"]: line["loss"] for line in job.lines(0) if "step" in line}
    for text in job.store.read("bucket/run/lines.jsonl").splitlines():
        line = json.loads(text)
        if "step" in line:
            expect(losses.pop(line["step"], line["loss"]) == line["loss"], f"wrong: {line}")
    expect(not losses, f"steps {sorted(losses)} are not on the store: {stderr}")


def faulty_stores(rng: random.Random, folder: pathlib.Path, count: int, kind: str) -> dict:
    """A run on a store with faults is killed `count` times, and started until it is at its end; a
    start may be refused with one line.
    """
    expected = truth(str(folder.parent), 1, STEPS)
    refused = 0
    kills = 0
    with RunningStore(folder) as store:
        more = (1000, "gs://bucket/run")
        job = StoreJob(folder / "run", steps=STEPS, every=EVERY, pause=0.02, more=more, store=store)
        store.set_faults(**FAULTS[kind], seed=rng.randrange(2**31))
        for _ in range(count + STARTS):
            kill_after = rng.randrange(1, STEPS // 2) if kills < count else STEPS + 1
            code, text = run_once(job, kind, kill_after, rng)
            if code == 0:
                break
            if code == -signal.SIGKILL:
                kills += 1
                continue
            expect(code in (1, 2, 69) and len(error_lines(text)) == 1, (code, text[-3000:]))
            refused += 1
        expect(code == 0, f"not at its end after {count + STARTS} starts: {text[-3000:]}")
        check(job, expected)
        expect(job.committed()[-1] == STEPS, f"the last checkpoint is not saved: {text}")
        check_lines(job, text)
        injected = sum(store.injected().values())
    expect(injected, "no request failed: nothing was tested")
    failures = sum(line.get("failures", 0) for line in job.lines(0))
    counts = dict(injected_faults=injected, failed_saves=failures, refused_starts=refused)
    return dict(tried=count, **{name: value for name, value in counts.items() if value})
