"""What a run tells: metrics.jsonl, TensorBoard events by clu, log.txt, and a progress bar."""

import contextlib
import json
import logging
import math
import sys

import jax
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


class StderrHandler(logging.StreamHandler):
    """Looks up sys.stderr at every line: the progress bar replaces it so that lines pass above the bar."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


@contextlib.contextmanager
def logging_to(workdir: epath.Path | None):
    """Sends the project's log to stderr and, from the leading process, to log.txt in `workdir` if there is one."""
    root = logging.getLogger("vit_jax")
    root.setLevel(logging.INFO)
    root.propagate = False
    form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    with contextlib.ExitStack() as stack:
        root.handlers[:] = [StderrHandler()]
        if workdir is not None and jax.process_index() == 0:
            root.addHandler(logging.StreamHandler(stack.enter_context((workdir / "log.txt").open("a"))))
        for handler in root.handlers:
            handler.setFormatter(form)
        try:
            yield
        finally:
            root.handlers[:] = root.handlers[:1]


def read_lines(path: epath.Path) -> list[dict]:
    """The whole lines of a metrics.jsonl; a half line at the end (a kill while writing) is left out."""
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(line)
    return lines


def rewind(path: epath.Path, step: int) -> None:
    """Drops a half line and the lines after `step`, so that a resumed run writes each step once."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step]
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text("".join(kept))
    fresh.replace(path)


class MetricWriter:
    """Writes scalars of a step to all places; only the leading process writes."""

    def __init__(self, workdir: epath.Path, resumed_step: int):
        self.path = workdir / "metrics.jsonl"
        self.leads = jax.process_index() == 0
        self.tensorboard = None
        if self.leads:
            from clu import metric_writers  # imports TensorFlow

            rewind(self.path, resumed_step)
            self.tensorboard = metric_writers.create_default_writer(str(workdir), just_logging=False)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One line per step: call once, with everything that the step measured."""
        if not self.leads:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **scalars}) + "\n")
        self.tensorboard.write_scalars(step, {name: value for name, value in scalars.items() if math.isfinite(value)})

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()


class ProgressBar:
    """Steps done, loss, speed, data wait and remaining time; a bar on a terminal, log lines elsewhere."""

    def __init__(self, total_steps: int, step: int):
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and jax.process_index() == 0
        columns = (
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task("compiling", total=total_steps, completed=step)
        self.total = total_steps
        self.bar.start()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def report(self, step: int, scalars: dict[str, float]) -> None:
        """Shows the newest metrics."""
        speed = scalars["perf/images_per_sec"]
        left = (self.total - step) * scalars["perf/step_ms"] / 1e3
        text = f"loss {scalars['train/loss']:.4f}  {speed:.0f} images/s  data wait {scalars['perf/data_wait']:.0%}"
        self.bar.update(self.task, description=text)
        if not self.live:
            log.info("step %d/%d  %s  ETA %s", step, self.total, text, duration(left))

    def close(self) -> None:
        self.bar.stop()


def duration(seconds: float) -> str:
    """ "1:02:03" for 3723 seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
