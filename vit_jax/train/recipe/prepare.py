"""From a folder of images and weights to a config: facts, choices, measurements, and the record of
them in the workdir, by which a second start makes the same choices.
"""

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence

import jax
from etils import epath
from rich.table import Table

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.cli import regular
from vit_jax.cli.terminal import Console
from vit_jax.distributed import messages, versions
from vit_jax.errors import UserError
from vit_jax.train import run_data
from vit_jax.train.recipe import choose, facts, held_out, measure
from vit_jax.train.recipe.choose import Choice
from vit_jax.train.schedules import plan_steps
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats.weights import Weights

log = logging.getLogger("vit_jax.finetune")

NAME = "config.json"
UNSET = "(unset)"
COMMAND_LINE = "on the command line"


@dataclasses.dataclass(frozen=True)
class Recipe:
    config: object
    steps: int  # of the final run
    lrs: tuple[float, ...]
    rows: list[list[str]]  # what was chosen, and why
    flags: Mapping[str, object]  # of the user, by name
    largest: tuple[str, float] = ("", 0.0)  # class with the most images, and its share; "": none


def default_workdir(text: str) -> str:
    """FOLDER-finetuned in the current folder."""
    name = os.path.basename(text.rstrip("/").rpartition(":")[2]) or "images"
    return f"{os.path.splitext(name)[0]}-finetuned"


def check_outside(workdir: str, data_name: str) -> None:
    """Raises UserError if the workdir is in the folder of images, where it would become a class."""
    kind, _, path = data_name.partition(":")
    if kind != "folder" or "://" in workdir or "://" in path:
        return
    folder, inner = (os.path.realpath(os.path.expanduser(name)) for name in (path, workdir))
    if os.path.commonpath([folder, inner]) == folder:
        raise UserError(
            f"--workdir={workdir} is inside the folder of images {path}: choose one outside of it"
        )


def location_of(weights: str) -> str:
    """The absolute path of a local file or folder, for a second start from another folder."""
    return os.path.abspath(weights) if os.path.exists(weights) else weights


@dataclasses.dataclass(frozen=True)
class Found:
    """What was read: the data, how they are divided, and the weights."""

    data: facts.Data
    part: Choice
    sizes: choose.Sizes
    weights: Weights


def read_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """The keys that --config.KEY=VALUE set, of any config that a recipe can have."""
    values = {"evals.held_out.type": "classification", "evals.test.type": "classification"}
    return configs.read_overrides(configs.assemble(values), list(arguments))


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user gives."""

    data_name: str
    init_from: str
    given: Mapping[str, object] = dataclasses.field(default_factory=dict)  # overrides
    lrs: tuple[float, ...] = ()  # (): ours
    held_out: str = ""  # "": ours

    def flags(self) -> dict[str, object]:
        """What the user gives besides data and weights, by flag, as JSON."""
        flags = {f"--config.{key}": value for key, value in self.given.items()}
        if self.lrs:
            flags["--lrs"] = ",".join(f"{lr:g}" for lr in self.lrs)
        if self.held_out:
            flags["--held_out"] = self.held_out
        return json.loads(json.dumps(flags))

    def config(self, choices: Sequence[Choice] = (), **more):
        """The config of some choices, with the user's overrides."""
        values = {"data.name": self.data_name, "init_from": self.init_from}
        values |= {"evals.held_out.type": "classification"}
        for choice in choices:
            values |= choice.values
        return configs.override(values | more, self.given, COMMAND_LINE)

    def check(self) -> None:
        """Raises UserError for an override that no recipe could have, before anything is read."""
        sizes = choose.Sizes(1, 1)
        choices = [choose.augmentation(sizes), *choose.training(choose.Plan(), sizes)]
        self.config(choices, **{"evals.test.type": "classification"})

    def data(self):
        """The config of everything that the recipe divides into parts, as far as data go."""
        if "data.subset" in self.given:
            raise UserError(
                "config key data.subset is needed to hold a part out: choose the part by "
                "--held_out, such as 20%, and what is trained on by data.split"
            )
        parts = ("data.", "user.")
        mine = {key: value for key, value in self.given.items() if key.startswith(parts)}
        config = configs.override({"data.name": self.data_name}, mine, COMMAND_LINE)
        with config.unlocked():
            config.data.class_balance = 0.0
        return config

    def row(self, choice: Choice, config) -> list[str]:
        """A choice as a row of the table, or what the user set instead of it."""
        given = [key for key in choice.values if key in self.given]
        if not given:
            return [choice.what, choice.chosen, choice.why]
        flat = dict(configs.flatten(config))
        chosen = ", ".join(f"{key}={flat.get(key)}" for key in given)
        return [choice.what, chosen, "set on the command line"]


def is_in(path: str) -> bool:
    """Whether a workdir has a recipe."""
    return (epath.Path(path).expanduser() / NAME).exists()


def load_or_make(folder: epath.Path, wish: Wish, found: Found | None) -> Recipe:
    """The recipe in the workdir; a new one is written there."""
    recipe = load(folder, wish)
    if recipe:
        show(recipe.rows, f"as chosen before, in {folder / NAME}")
        return recipe
    recipe = make(wish, found or find(wish))
    if jax.process_index() == 0:
        save(folder, recipe)
    messages.first_problem("the record of the recipe", None)  # wait for process 0
    return load(folder, wish)


def save(folder: epath.Path, recipe: Recipe) -> None:
    record = dict(
        config=configs.to_json(recipe.config),
        steps=recipe.steps,
        lrs=recipe.lrs,
        rows=recipe.rows,
        flags=recipe.flags,
        largest=recipe.largest,
        versions=versions.versions(),
    )
    cli.replace_file(folder / NAME, json.dumps(record, indent=2) + "\n")


def load(folder: epath.Path, wish: Wish) -> Recipe | None:
    """What `save` has written, with the overrides that are new; None if there is nothing.

    Raises:
      UserError: it is damaged, or of other images, weights or flags that matter.
    """
    path = folder / NAME
    try:
        record = json.loads(regular.read_text(path))
        saved = dict(configs.flatten(record["config"]))
        flags = dict(record["flags"])
        largest = tuple(record.get("largest", ("", 0.0)))  # a run of an earlier version has none
        recipe = Recipe(None, record["steps"], tuple(record["lrs"]), record["rows"], flags, largest)
        before = (saved["data.name"], saved["init_from"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} can't be read ({error}): restore it, or choose another --workdir"
        ) from error
    if before != (wish.data_name, wish.init_from):
        raise UserError(
            f"--workdir={folder} has a fine-tuning of {before[1]} on {before[0]}: choose another "
            "folder"
        )
    now = wish.flags()
    different = differences(flags, now)
    if different:
        raise UserError(
            f"--workdir={folder} has a fine-tuning with other flags ({'; '.join(different)}): "
            "choose another --workdir, or undo these differences"
        )
    unknown = [key for key in saved if configs.find(key) is None]
    if unknown:
        raise UserError(
            f"{path} has the config key {unknown[0]}, which this version does not have: choose "
            "another --workdir"
        )
    values = {key: value for key, value in saved.items() if value is not None}
    changed = {key: wish.given[key] for key in wish.given if is_changed(key, flags, now)}
    config = configs.override(values, changed, COMMAND_LINE)
    return dataclasses.replace(recipe, config=config)


def is_changed(key: str, before: Mapping, now: Mapping) -> bool:
    flag = f"--config.{key}"
    return before.get(flag, UNSET) != now[flag]


def differences(before: Mapping, now: Mapping) -> list[str]:
    """Lines "flag: before -> now" for those by which the recipe would be another."""
    return [
        f"{flag}: {before.get(flag, UNSET)} -> {now.get(flag, UNSET)}"
        for flag in sorted(before.keys() | now.keys())
        if before.get(flag, UNSET) != now.get(flag, UNSET)
        and not configs.may_change(flag.removeprefix("--config."))
    ]


def find(wish: Wish) -> Found:
    """Reads what the recipe depends on.

    Raises:
      UserError: it can't be read, or no classifier can be trained on it.
    """
    wish.check()
    data = facts.read_data(wish.data())
    choose.check(data)
    part, sizes = held_out.hold_out(data, wish.held_out)
    ignored = [f"evals.held_out.data.{key}" for key in ("name", "split")]
    ignored = [key for key in ignored if key in wish.given]
    if ignored and "data.subset" in part.values:
        raise UserError(
            f"config key {ignored[0]} has no effect, for a part of the training data is held out: "
            "call your own part val (a split, or a folder beside train), or use --config"
        )
    return Found(data, part, sizes, pretrained.read(wish.init_from))


def make(wish: Wish, found: Found) -> Recipe:
    """Chooses by the data and the weights, then by what a step costs; shows both as tables."""
    device = facts.read_device()
    data = found.data
    sizes = found.sizes
    start = facts.of_weights(found.weights)
    choices = [choose.model(start, device), found.part, *choose.report_on(data)]
    choices += [*choose.classes(data), choose.augmentation(sizes)]
    choices.append(choose.batch_size(sizes, device))
    config = wish.config(choices, total_steps=1)
    rows = [wish.row(choice, config) for choice in choices]
    show(rows, title(data))

    sizes = dataclasses.replace(sizes, batch=config.data.batch_size)
    if "total_steps" in wish.given or "total_epochs" in wish.given:
        sizes = dataclasses.replace(sizes, given=plan_steps(config, sizes.train))
    fields = pretrained.pooled_as(found.weights, config.model.pool)
    measured = measurements(wish, choices, sizes, device, fields)
    lrs = (config.optim.lr,) if "optim.lr" in wish.given else wish.lrs
    plan, seconds = choose.choose_plan(choose.plans(device, lrs), sizes, measured)
    decided = choose.training(plan, sizes)
    cost = measured(plan.head_only)
    config = wish.config([*choices, *decided], accum_steps=cost.accum_steps)
    if config.accum_steps < cost.accum_steps:
        log.warning(
            "accum_steps=%d does not fit into the memory: it is %d",
            *(config.accum_steps, cost.accum_steps),
        )
        config = measure.with_microbatches(config, cost.accum_steps)
    costs = [wish.row(choice, config) for choice in decided]
    costs += [memory_row(cost, device, config), time_row(seconds, cost, sizes)]
    show(costs, f"on {device.count} x {device.kind}")
    steps = sizes.steps(plan.epochs)
    return Recipe(config, steps, plan.lrs, rows + costs, wish.flags(), data.largest)


def measurements(wish: Wish, choices, sizes, device, fields) -> Callable[[bool], measure.Measured]:
    """f(head only?) -> what a step costs, measured once."""
    source = run_data.open_training_data(wish.config(choices, total_steps=1))

    @functools.cache
    def measured(head_only: bool) -> measure.Measured:
        plan = choose.Plan(head_only)
        log.info("measuring the step that trains %s", choose.trained(plan))
        config = wish.config([*choices, *choose.training(plan, sizes)])
        return measure.measure(config, source, fields, device.memory)

    return measured


# --- what is shown ---


def title(data: facts.Data) -> str:
    classes = data.num_classes if data.many_labels else int((data.counts > 0).sum())
    return f"{len(data.labels):,} images of {classes:,} classes in {data.name}"


def memory_row(found: measure.Measured, device: facts.Device, config) -> list[str]:
    parts = config.accum_steps
    what = "no microbatches" if parts == 1 else f"{parts} microbatches"
    free = "" if device.memory is None else f" of {device.memory / 2**30:.1f}"
    return ["memory", what, f"a step takes {found.step_bytes / 2**30:.1f}{free} GiB"]


def time_row(seconds: float, found: measure.Measured, sizes: choose.Sizes) -> list[str]:
    why = f"{found.step_s:.2g} s for a step of {sizes.batch} images; less if it stops early"
    return ["time", f"about {duration(seconds)}", why]


def duration(seconds: float) -> str:
    """Such as "12 minutes"."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def show(rows: list[list[str]], heading: str) -> None:
    """A table on stderr, as the log, which comes after and before it."""
    if jax.process_index() != 0:
        return
    table = Table("what", "choice", "why", title=heading, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
