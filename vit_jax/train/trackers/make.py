"""The trackers that a config chooses."""

import functools
import importlib.util
import time
from collections.abc import Callable

import jax

from vit_jax.cli.spool import Files
from vit_jax.config import is_own, own_parts
from vit_jax.distributed import messages
from vit_jax.errors import UserError
from vit_jax.train.trackers import mlflow, wandb
from vit_jax.train.trackers.run_ids import RunIds
from vit_jax.train.trackers.sender import END_S, Earlier, Sender
from vit_jax.train.trackers.tracker import Tracker

A_TRACKER = "a subclass of vit_jax.train.trackers.tracker.Tracker"
KINDS = {"wandb": wandb.Wandb, "mlflow": mlflow.MLflow}


def is_installed(library: str) -> bool:
    """Whether there is such a package; a folder of this name, which both libraries make in the
    current one, is not enough.
    """
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def check(config) -> None:
    """Raises UserError, on all processes, if a class of the user's own is not a tracker, or process
    0 lacks the library of one.
    """
    for name in filter(is_own, config.trackers):
        part = own_parts.part("trackers", name, config)
        if isinstance(part.function, type) and not issubclass(part.function, Tracker):
            raise part.error(f"is not {A_TRACKER}")
    problem = None
    names = config.trackers if jax.process_index() == 0 else ()
    missing = [name for name in names if name in KINDS and not is_installed(name)]
    if missing:
        problem = (
            f"config key trackers has {missing[0]}, which is not installed: pip install "
            f"{missing[0]}, or leave it out"
        )
    if config.trackers:
        problem = messages.first_problem("the trackers", problem)
    if problem:
        raise UserError(problem)


def make_own(name: str, config, files: Files) -> Tracker:
    """A tracker of the user's own.

    Raises:
      UserError: it fails, or is something else.
    """
    part = own_parts.part("trackers", name, config)
    tracker = part(workdir=str(files.workdir))
    if not isinstance(tracker, Tracker):
        raise part.error(f"gives {own_parts.shown(tracker)}, but it must give {A_TRACKER}")
    return tracker


def maker(name: str, config, files: Files) -> Callable[[], Tracker]:
    if is_own(name):
        return functools.partial(make_own, name, config, files)
    return functools.partial(KINDS[name], config, files.workdir)


def start(config, files: Files, earlier: Earlier) -> list[Sender]:
    """Begins to send to the trackers of a run; call it on process 0."""
    names = dict.fromkeys(config.trackers)
    if not names:
        return []
    run_ids = RunIds(files)
    return [Sender(name, maker(name, config, files), run_ids, earlier) for name in names]


def finish(senders: list[Sender], error: BaseException | None) -> None:
    """Ends all of them, in bounded time; `error`: what ended the run."""
    exit_code = 0 if error is None else getattr(error, "exit_code", 1)
    until = time.monotonic() + END_S
    for sender in senders:
        sender.finish(exit_code)
    for sender in senders:
        sender.join(until)
