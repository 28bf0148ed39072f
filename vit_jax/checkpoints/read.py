"""One checkpoint on disk: its path, meta, state and parameters, verified by checksums."""

import errno
import math
import os
import re
import sys
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.checkpoints import checksums
from vit_jax.cli import regular
from vit_jax.distributed import messages
from vit_jax.distributed.runtime import check_fits
from vit_jax.errors import Unavailable, UserError, one_line


def silence_late_io() -> None:
    """Hides the tracebacks of the coroutines that Orbax abandons when a read or write fails."""
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
    """The absolute path that Orbax needs; gs:// and the like stay as they are."""
    if "://" in str(path):
        return epath.Path(path)
    return epath.Path(path).expanduser().resolve()


def check_name(path) -> epath.Path:
    """The absolute path of a folder for checkpoints, or in which they are.

    Raises:
      UserError: TensorStore can't use its name.
    """
    folder = absolute(path)
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{folder} is a name that is not in UTF-8, with which checkpoints can't be written or "
            "read: rename it"
        ) from None
    return folder


def folders_of(path) -> tuple[epath.Path, ...]:
    """Where a checkpoint may be: the folder itself, that of a workdir's checkpoints, and that of
    the final run in the workdir of `vit_jax.finetune`.
    """
    path = epath.Path(path)
    return path, path / "checkpoints", path / "final/checkpoints"


def is_ours(path) -> bool:
    """Whether a folder is a checkpoint, or contains checkpoints."""
    return (epath.Path(path) / "state").exists() or any(map(steps, folders_of(path)))


def steps(folder) -> list[int]:
    """Those of the checkpoints in a folder, which may not exist; the newest is last."""
    folder = epath.Path(folder)
    children = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(child.name) for child in children if child.name.isdigit())


def delivered(folder) -> int | None:
    """Of the checkpoints in a folder the one that the run delivers: the newest, or with early
    stopping the best.
    """
    found = steps(folder)
    if not found:
        return None
    try:
        meta = read_meta(folder / str(found[-1]))
    except UserError:  # whoever reads the checkpoint reports that
        return found[-1]
    stops_early = meta.get("config", {}).get("early_stopping", 0)
    if stops_early and meta["best"] in found:
        return meta["best"]
    return found[-1]


def find(path) -> epath.Path:
    """The folder of one checkpoint: `path` itself, or of a workdir or a `checkpoints` folder the
    one that the run delivers.
    """
    path = check_name(path)
    for folder in folders_of(path):
        if (folder / "state").exists() and (folder / "meta").exists():
            return folder
        step = delivered(folder)
        if step is not None:
            return folder / str(step)
    raise UserError(
        f"{path} holds no checkpoint: give a workdir, or a folder checkpoints/STEP in one"
    )


def write_params(folder, params: dict, meta: dict) -> None:
    """Writes a checkpoint of parameters alone, completely or not at all.

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
    """(meta, checksums of the leaves) of a checkpoint; any exception if they are damaged."""
    regular.check_below(folder)
    if "://" not in str(folder):
        must_be_permitted(folder)
    return checksums.unseal(ocp.JsonCheckpointHandler().restore(epath.Path(folder) / "meta"))


def must_be_permitted(folder) -> None:
    """Raises OSError if a file or folder below may not be read: Orbax takes it for missing or
    damaged.
    """

    def fail(error: OSError) -> None:
        raise error

    os.listdir(os.path.join(folder, "meta"))
    for path, _, names in os.walk(folder, onerror=fail):
        for name in names:
            if not os.access(os.path.join(path, name), os.R_OK, effective_ids=EFFECTIVE):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


# Errors that do not mean that the file is damaged: those that may be over in a minute,
TEMPORARY = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|Too many open files|Stale file handle|Input/output error|"
    "Cannot allocate memory|timed out|CURL error|libcurl code|HTTP response code:? (408|429|5)|"
    "http_response_code='(408|429|5)|All [0-9]+ retry attempts failed|"
    "Could not find directory gs://"
)
# and those that last until the user does something.
DENIED = re.compile(
    "UNAUTHENTICATED|PERMISSION_DENIED|Permission denied|HTTP response code:? (401|403)|"
    "http_response_code='(401|403)"
)
EFFECTIVE = os.access in os.supports_effective_ids  # user, as of `sudo`
TRIES = 3  # of a checkpoint on a store, whose answers may be damaged on their way


class Unreachable(UserError):
    """A checkpoint that can't be read now, and may be whole."""


class CheckpointUnavailable(Unreachable, Unavailable):
    """The disk or store does not answer."""


def problem_of(error: Exception) -> str:
    """What went wrong, in a few hundred letters; first what decides about its kind, which may come
    late in a message.
    """
    text = one_line(error) or type(error).__name__
    kind = DENIED.search(text[300:]) or TEMPORARY.search(text[300:])
    return f"{kind[0]}: {text[:300]}" if kind else text[:300]


def problem_with(path, problem: str) -> UserError:
    """The error to raise if reading a checkpoint failed with the text `problem`."""
    now = f"{path} can't be read now ({problem}): nothing was changed; fix that, and try again"
    if DENIED.search(problem):
        return Unreachable(now)
    if TEMPORARY.search(problem):
        return CheckpointUnavailable(now)
    return UserError(f"{path} can't be used ({problem}): choose another checkpoint")


def unreadable(path, error: Exception) -> UserError:
    return problem_with(path, problem_of(error))


def read_meta(folder) -> dict:
    """The `meta` that was given to `Checkpointer.save`, with `step` and `metrics`.

    Raises:
      UserError: it can't be read, or is damaged.
    """
    try:
        return sealed_facts(folder)[0]
    except Exception as error:
        raise unreadable(epath.Path(folder) / "meta", error) from error


def read_state(folder, make_abstract) -> dict:
    """The complete state of a checkpoint, in the layout of `make_abstract`; see
    `Checkpointer.restore`.

    Raises:
      UserError: on all processes, if one of them can't read it or finds it damaged, on a store
        each of TRIES times.
    """
    tries = TRIES if "://" in str(folder) else 1
    for left in reversed(range(tries)):
        try:
            return read_state_once(folder, make_abstract)
        except UserError as error:
            if isinstance(error, Unreachable) or not left:
                raise


def read_state_once(folder, make_abstract) -> dict:
    state = None
    expected = {}
    problem = None
    try:
        meta, expected = sealed_facts(folder)
        # In the manager's restore the other processes would wait for one that fails.
        args = ocp.args.StandardRestore(make_abstract(meta))
        state = ocp.StandardCheckpointHandler().restore(epath.Path(folder) / "state", args=args)
    except Exception as error:  # whatever a damaged file leads to
        problem = problem_of(error)
    problem = messages.first_problem(f"the reading of {folder}", problem)
    if problem:
        raise problem_with(folder, problem)
    try:
        checksums.check(state, expected)
    except UserError as error:
        raise unreadable(folder, error) from None
    return state


def read_params(folder) -> dict:
    """Parameters of a checkpoint as numpy arrays, on any machine; `ema_params` if there are any."""
    silence_late_io()
    path = epath.Path(folder) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        expected = sealed_facts(folder)[1]
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise UserError("its _METADATA can't be read")
        name = "ema_params" if metadata.tree.get("ema_params") else "params"
        item = {name: metadata.tree[name]}
        check_fits(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(item)), path)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
        params = checkpointer.restore(path, args=args)
        checksums.check(params, expected)
        return params[name]
    except Exception as error:
        raise unreadable(path, error) from error
