"""The folder of a run: it can be written, and it belongs to one config."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping

import jax
from etils import epath

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli import lock, objects, regular
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, messages, versions
from vit_jax.distributed.waits import waiting
from vit_jax.errors import UserError, one_line, storage_problem


def add_arguments(parser) -> None:
    """The flag that `held` takes."""
    parser.add_argument(
        "--take_over",
        action="store_true",
        help="use the workdir even if another run, which must be dead, seems to use it",
    )


@contextlib.contextmanager
def held(workdir: epath.Path, take_over: bool = False) -> Iterator[None]:
    """Keeps other runs out of a workdir; process 0 does it for all.

    Raises:
      UserError: on all processes, if another run that lives is there.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        try:
            if jax.process_index() == 0:
                with waiting(f"{workdir} to be free"):
                    stack.enter_context(lock.held(workdir, take_over))
        except UserError as error:
            problem = str(error)
        problem = messages.first_problem(f"the use of {workdir}", problem)
        if problem:
            raise UserError(problem)
        yield


def make(path: str) -> epath.Path:
    """Creates the workdir and proves that it can be written."""
    try:
        workdir = checkpoint.check_name(path)
    except KeyError:
        raise UserError(
            f"--workdir={path} is on a store of unknown kind: use a local path or gs://"
        ) from None
    bad = set("[]\\") & set(str(workdir))
    if bad:
        raise UserError(
            f"--workdir={workdir} has the character {min(bad)}, with which checkpoints can't be "
            "read back: rename it"
        )
    regular.check_folder(workdir)
    regular.check_folder(workdir / "logs")
    objects.must_be_reachable(path, f"--workdir={path}")
    try:
        with waiting(f"--workdir={path}"):
            workdir.mkdir(parents=True, exist_ok=True)
            probe = workdir / f".write_test_{jax.process_index()}"
            probe.write_text("ok")
            probe.unlink()
    except FileExistsError:
        raise UserError(
            f"--workdir={path} is a file or a broken link: choose another folder"
        ) from None
    except Exception as error:  # every store has errors of its own
        problem = storage_problem(error) or one_line(error)[:160]
        raise UserError(
            f"--workdir={path} can't be written ({problem}): choose another folder"
        ) from error
    return workdir


# Keys of earlier versions, with the value that means what is done now.
REMOVED = {("vtab.generated", False)}
# Keys that earlier versions did not have, with the values with which their runs are continued.
ADDED = {
    ("data.augment", ()),
    ("data.class_balance", 0.0),
    ("data.decode", "exact"),
    ("data.exif_rotation", False),
    ("data.randaug_ops", "big_vision"),
    ("data.unlabelled", False),
    ("early_stopping", 0),
    ("model.mlp", ""),
    ("model.weight_init", "jax"),
    ("objective", "classify"),
    ("optim.wd_end", 0.0),
}


def stated(config: Mapping, other: Mapping) -> dict:
    """A config by dotted keys, but for keys that the version of the other one did not have, if they
    have the values that it implied.
    """
    implied = ADDED | REMOVED
    return {
        key: value for key, value in config.items() if key in other or (key, value) not in implied
    }


def is_fixed(key: str) -> bool:
    """Whether a run can't be continued with another value."""
    return not configs.may_change(key)


def counts_checkpoints(config, key: str) -> bool:
    """Whether early stopping counts the checkpoints since the best by this key."""
    return config.early_stopping > 0 and key in ("checkpoint.every", "checkpoint.keep_best")


def differences(config, saved: Mapping, matters: Callable[[str], bool] = is_fixed) -> list[str]:
    """Lines "key: saved -> now" for the keys that matter."""
    before = {key: value for key, value in configs.flatten(saved) if (key, value) not in REMOVED}
    added = ADDED
    if not any(name.partition(":")[0] in catalog.LISTED for name in catalog.data_sets(config.data)):
        added = ADDED | {("data.exif_rotation", True)}  # which changes image files only
    now = {
        key: value
        for key, value in configs.flatten(config)
        if key in before or (key, value) not in added
    }
    keys = {key for key in now.keys() | before.keys() if matters(key)}
    if now["optim.name"] == "adafactor":
        keys.add("model.scan")  # the factors of its moments depend on the layer layout

    def show(values, key):
        return repr(values[key]) if key in values else "(unset)"

    return [
        f"{key}: {show(before, key)} -> {show(now, key)}"
        for key in sorted(keys)
        if show(before, key) != show(now, key)
    ]


def check(
    workdir: epath.Path,
    config,
    fingerprint: str,
    matters: Callable[[str], bool] = is_fixed,
    teacher: str = "",
) -> None:
    """Refuses a workdir that holds another run, or whose training data or teacher have changed
    since it began.

    Args:
      fingerprint, teacher: of the training data and of the teacher's parameters.

    Raises:
      UserError: it names the keys that differ.
    """
    path = workdir / "config.json"

    def is_kept(key: str) -> bool:
        return matters(key) or counts_checkpoints(config, key)

    try:
        saved = json.loads(path.read_text()) if path.exists() else sealed(workdir)
        if saved is None:
            return
        different = differences(config, saved["config"], is_kept)
        began = saved.get("data_fingerprint", fingerprint)
        taught_by = saved.get("teacher_fingerprint", teacher)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} can't be read ({error}): choose another --workdir") from error
    except OSError as error:
        raise UserError(
            f"{error.filename or path} can't be read ({error.strerror}): choose another --workdir"
        ) from error
    if different:
        raise UserError(
            f"--workdir={workdir} has a run of another config ({'; '.join(different)}): "
            f"choose another --workdir, or undo these differences{longer(workdir, different)}"
        )
    if began != fingerprint:
        raise UserError(
            f"{config.data.name} is not what it was when the run in --workdir={workdir} began "
            f"(fingerprint {began}, now {fingerprint}): files were added, removed or renamed; "
            "restore them, or choose another --workdir"
        )
    if taught_by != teacher:
        raise UserError(
            f"{config.distill.teacher} is not the teacher with which the run in "
            f"--workdir={workdir} began (fingerprint {taught_by}, now {teacher}): restore its "
            "weights, or choose another --workdir"
        )


def longer(workdir: epath.Path, different: list[str]) -> str:
    """What to do if the length is all that is different, and there is a checkpoint; else ""."""
    steps = checkpoint.steps(workdir / "checkpoints")
    if not steps or not all(line.startswith("total_") for line in different):
        return ""
    return (
        "; to train longer, add "
        f"--config.branch_from={workdir}/checkpoints/{steps[-1]} to the other --workdir"
    )


def sealed(workdir: epath.Path) -> dict | None:
    """The meta of the newest valid checkpoint, with the config of the run; None without any."""
    folder = workdir / "checkpoints"
    for step in reversed(checkpoint.steps(folder)):
        with contextlib.suppress(UserError):  # `Checkpointer.restore` says what is wrong with it
            return checkpoint.read_meta(folder / str(step))
    return None


def continuation(workdir: epath.Path) -> str:
    """What the same command does after this process has ended."""
    steps = checkpoint.steps(workdir / "checkpoints")
    if steps:
        return f"the same command continues from step {steps[-1]}"
    return "nothing is saved, and the same command begins again"


def claim(
    workdir: epath.Path,
    config,
    fingerprint: str,
    teacher: str = "",
    sizes: Mapping | None = None,
) -> dict[str, list]:
    """Writes config.json: the resolved config, what the training data and the teacher are, sizes,
    devices, versions, commit and command.

    Args:
      sizes: `Experiment.sizes`; None for what is not one run.

    Returns:
      key -> [before, now] of what differs from the start before.
    """
    record = dict(config=configs.to_json(config), data_fingerprint=fingerprint)
    if teacher:
        record["teacher_fingerprint"] = teacher
    if sizes:
        record["sizes"] = sizes
    record |= dict(
        devices=hardware.devices(),
        versions=versions.versions(),
        commit=versions.commit(),
        code=versions.code(),
        command=sys.argv,
    )
    if jax.process_index() != 0:
        return {}
    path = workdir / "config.json"
    changed = changes(path, record)
    cli.replace_file(path, json.dumps(record, indent=2) + "\n")
    return changed


def changes(path: epath.Path, record: Mapping) -> dict[str, list]:
    """Key -> [before, now] of the devices, versions, code and config of a start that differ from
    those in config.json; {} if there is none, or it can't be read.
    """
    try:
        before = flat_record(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    now = flat_record(json.loads(json.dumps(record)))
    keys = (key for key in now if key in before and before[key] != now[key])
    return {key: [before[key], now[key]] for key in keys}


def flat_record(record: Mapping) -> dict:
    parts = {part: record[part] for part in ("devices", "versions", "commit", "code")}
    return dict(configs.flatten(parts)) | dict(configs.flatten(record["config"]))
