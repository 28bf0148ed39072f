"""One checkpoint on disk: where it is, and its facts, state and parameters, read and compared with
their checksums.
"""

import math
import re
import sys
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.checkpoints import checksums
from vit_jax.distributed import messages
from vit_jax.distributed.runtime import check_fits
from vit_jax.errors import UserError, one_line


def silence_late_io() -> None:
    """Orbax gives up its coroutines when a read or write fails; those still under way then print no
    traceback each.
    """
    warnings.filterwarnings(
        "ignore", r"coroutine '.*async_\w*serialize.* was never awaited", RuntimeWarning
    )
    show = sys.unraisablehook
    if show.__module__ == __name__:
        return

    def hook(unraisable):
        code = getattr(unraisable.object, "cr_code", None)
        is_late = code is not None and "orbax" in code.co_filename
        if not is_late and str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


def absolute(path) -> epath.Path:
    """A local path made absolute, as Orbax wants it; gs:// and the like as they are."""
    return epath.Path(path) if "://" in str(path) else epath.Path(path).expanduser().resolve()


def is_ours(path) -> bool:
    """Whether a folder is a checkpoint, or holds checkpoints."""
    path = epath.Path(path)
    folders = (path, path / "checkpoints")
    return (path / "state").exists() or any(
        child.name.isdigit() for folder in folders if folder.is_dir() for child in folder.iterdir()
    )


def find(path) -> epath.Path:
    """The folder of one checkpoint, from it, from a `checkpoints` folder, or from a workdir (the
    newest).

    Raises:
      UserError: there is none.
    """
    path = absolute(path)
    for folder in (path, path / "checkpoints"):
        if (folder / "state").exists() and (folder / "meta").exists():
            return folder
        if folder.is_dir():
            steps = [int(child.name) for child in folder.iterdir() if child.name.isdigit()]
            if steps:
                return folder / str(max(steps))
    raise UserError(
        f"{path} holds no checkpoint: give a workdir, or a folder checkpoints/STEP in one"
    )


def write_params(folder, params: dict, meta: dict) -> None:
    """Writes a checkpoint of parameters alone, whole or not at all.

    Args:
      folder: must not exist.
      params: tree of arrays.
      meta: as for `Checkpointer.save`.
    """
    state = {"params": params, "ema_params": {}}
    sealed = checksums.seal(meta, state)
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(sealed))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(absolute(folder), args=items)


def sealed_facts(folder) -> tuple[dict, dict[str, str]]:
    """(meta, checksums of the leaves) of a checkpoint; any exception where they are damaged."""
    return checksums.opened(ocp.JsonCheckpointHandler().restore(epath.Path(folder) / "meta"))


# What may be over in a minute, and says nothing about the file.
PASSING = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED|Permission denied|Too many "
    "open files|Stale file handle|Cannot allocate memory|timed out|HTTP response code: 5"
)


class Unreachable(UserError):
    """A checkpoint that can't be read now."""


def problem_with(path, problem: str) -> UserError:
    """What is wrong with a checkpoint, by what its reading failed with."""
    if PASSING.search(problem):
        return Unreachable(
            f"{path} can't be read now ({problem}): nothing was changed; mend that, and try again"
        )
    return UserError(f"{path} can't be used ({problem}): choose another checkpoint")


def unreadable(path, error: Exception) -> UserError:
    return problem_with(path, one_line(error)[:300] or type(error).__name__)


def read_meta(folder) -> dict:
    """What `save` was given as `meta`, with `step` and `metrics`.

    Raises:
      UserError: it can't be read, or is not as it was written.
    """
    try:
        return sealed_facts(folder)[0]
    except Exception as error:
        raise unreadable(epath.Path(folder) / "meta", error) from error


def read_state(folder, make_abstract) -> dict:
    """The whole state of a checkpoint, on the devices that `make_abstract` says; see
    `Checkpointer.restore`.

    Raises:
      UserError: on all processes, if one of them can't read it or finds that it is not as it was
        written.
    """
    state, expected, problem = None, {}, None
    try:
        meta, expected = sealed_facts(folder)
        # In Orbax's own restore the other processes would wait for one that fails.
        args = ocp.args.StandardRestore(make_abstract(meta))
        state = ocp.StandardCheckpointHandler().restore(epath.Path(folder) / "state", args=args)
    except Exception as error:  # whatever a damaged file leads to
        problem = one_line(error)[:300] or type(error).__name__
    if problem := messages.first_problem(f"the reading of {folder}", problem):
        raise problem_with(folder, problem)
    try:
        checksums.check(state, expected)
    except UserError as error:
        raise unreadable(folder, error) from None
    return state


def read_params(folder) -> dict:
    """Parameters of a checkpoint as numpy arrays on any machine; the averaged ones where the run
    averages.

    Raises:
      UserError: they can't be read, or are not as they were written.
    """
    silence_late_io()
    path, checkpointer = epath.Path(folder) / "state", ocp.PyTreeCheckpointer()
    try:
        expected = sealed_facts(folder)[1]
        if (metadata := checkpointer.metadata(path).item_metadata) is None:
            raise UserError("its _METADATA can't be read")
        tree = metadata.tree
        name = "ema_params" if tree.get("ema_params") else "params"
        wanted = {name: tree[name]}
        check_fits(
            sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(wanted)), path
        )
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True)
        params = checkpointer.restore(path, args=args)
        checksums.check(params, expected)
        return params[name]
    except Exception as error:
        raise unreadable(path, error) from error
