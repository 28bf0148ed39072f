"""The folder of a run: it can be written, and it belongs to one config."""

import json
import sys
from collections.abc import Callable, Mapping

import jax
from etils import epath

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli import objects
from vit_jax.distributed import versions
from vit_jax.distributed.waits import waiting
from vit_jax.errors import UserError, one_line, storage_problem


def make(path: str) -> epath.Path:
    """Creates the workdir and proves that it can be written."""
    bad = set("[]\\") & set(path)
    if bad:
        raise UserError(
            f"--workdir={path} has the character {bad.pop()}, with which checkpoints can't be read "
            "back: rename it"
        )
    try:
        workdir = checkpoint.absolute(path)
    except KeyError:
        raise UserError(
            f"--workdir={path} is on a store of unknown kind: use a local path or gs://"
        ) from None
    objects.must_be_reachable(path, f"--workdir={path}")
    try:
        with waiting(f"--workdir={path}"):
            workdir.mkdir(parents=True, exist_ok=True)
            probe = workdir / f".write_test_{jax.process_index()}"
            probe.write_text("ok")
            probe.unlink()
    except Exception as error:  # every store has errors of its own
        problem = storage_problem(error) or one_line(error)[:160]
        raise UserError(
            f"--workdir={path} can't be written ({problem}): choose another folder"
        ) from error
    return workdir


# Keys of earlier versions, with the value that means what is done now.
REMOVED = {("vtab.generated", False)}


def is_fixed(key: str) -> bool:
    """Whether a run can't be continued with another value."""
    return not configs.may_change(key)


def differences(config, saved: Mapping, matters: Callable[[str], bool] = is_fixed) -> list[str]:
    """Lines "key: saved -> now" for the keys that matter."""
    now = dict(configs.flatten(config))
    before = {key: value for key, value in configs.flatten(saved) if (key, value) not in REMOVED}
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
    workdir: epath.Path, config, fingerprint: str, matters: Callable[[str], bool] = is_fixed
) -> None:
    """Refuses a workdir that holds another run, or whose training data have changed since it began.

    Raises:
      UserError: it names the keys that differ.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text())
        different = differences(config, saved["config"], matters)
        began = saved.get("data_fingerprint", fingerprint)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path} can't be read ({error}): choose another --workdir") from error
    if different:
        raise UserError(
            f"--workdir={workdir} has a run of another config ({'; '.join(different)}): "
            "choose another --workdir, or undo these differences"
        )
    if began != fingerprint:
        raise UserError(
            f"{config.data.name} is not what it was when the run in --workdir={workdir} began "
            f"(fingerprint {began}, now {fingerprint}): files were added, removed or renamed; "
            "restore them, or choose another --workdir"
        )


def claim(workdir: epath.Path, config, fingerprint: str) -> None:
    """Writes config.json: the resolved config, what the training data are, versions, commit and
    command.
    """
    record = dict(config=configs.to_json(config), data_fingerprint=fingerprint)
    record |= dict(
        versions=versions.versions(),
        commit=versions.commit(),
        code=versions.code(),
        command=sys.argv,
    )
    if jax.process_index() == 0:
        cli.replace_file(workdir / "config.json", json.dumps(record, indent=2) + "\n")
