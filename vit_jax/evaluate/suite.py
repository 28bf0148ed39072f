"""The evaluations of a config: opened once, run on any parameters, inside of training and
afterwards.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np
from etils import epath

from vit_jax.distributed import sharding, watchdog
from vit_jax.errors import UserError
from vit_jax.evaluate import classification, features, fewshot, knn, linear_probe
from vit_jax.weights import load as pretrained

log = logging.getLogger("vit_jax.evaluate")

ON_BATCHES = {"classification": classification.evaluate}
ON_FEATURES = {
    "fewshot": fewshot.evaluate,
    "knn": knn.evaluate,
    "linear_probe": linear_probe.evaluate,
}


@dataclasses.dataclass(frozen=True)
class Steps:
    """What is compiled: (params, batch) -> sums of the classification, or frozen features."""

    classify: Callable
    features: Callable
    num_classes: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One split: `key` tells whether two are the same."""

    key: tuple
    batches: Callable[[], Iterator[dict]]
    num_examples: int
    labels: Callable[[], np.ndarray]  # of all examples, which may take a scan


@dataclasses.dataclass(frozen=True)
class Evaluation:
    settings: object  # of `config.evals`
    num_classes: int
    test: Part
    train: Part | None  # of what learns from features


def open_all(
    config, mesh, class_names: tuple[str, ...], num_classes: int, folder: epath.Path | None = None
) -> dict[str, Evaluation]:
    """Opens the data of every entry of `config.evals`.

    Args:
      class_names, num_classes: of the model; those of a classification are matched with them.
      folder: where examples that are skipped are listed.
    """
    from vit_jax.data import eval_cache, pipeline, to_device
    from vit_jax.data.sources import open as sources
    from vit_jax.data.sources import source

    cache, parts = eval_cache.EvalCache(config.data.eval_cache_gib), {}

    def batches(decoded, rows, size):
        return to_device.to_device(decoded(), mesh, rows, size, config.data.prefetch)

    def open_part(name: str, data, split: str, is_classified: bool) -> tuple[int, Part]:
        where = data.name or config.data.name, data.data_dir or config.data.data_dir
        size = data.batch_size or config.data.batch_size
        if data.rest:
            where = "data.rest", ""
        key = (*where, split, size, data.crop, data.get("fraction"), data.method, is_classified)
        if key in parts:
            return parts[key]
        examples = (
            sources.open_rest(config.data)
            if data.rest
            else sources.open_source(where[0], split, where[1])
        )
        if is_classified:
            examples = source.with_classes(examples, class_names, num_classes, f"evals.{name}")
        rows = sharding.local_rows(mesh, size)
        common = (config.image_size, config.data.on_corrupt, config.data.threads)
        host = pipeline.eval_pipeline(data, examples, rows, size, *common)
        if folder is not None:
            host.bad.list_in(folder, f"evals.{name}")
        if examples.set_size and not is_classified:
            raise UserError(
                f"evals.{name} learns from features, for which an image must have one label; those "
                f"of {where[0]} have several: choose other data"
            )
        decoded = functools.partial(batches, cache.batches(host), rows, size)
        found = Part(key, decoded, len(examples), examples.labels)
        return parts.setdefault(key, (examples.num_classes, found))

    opened = {}
    for name, entry in config.evals.items():
        is_classified = entry.type in ON_BATCHES
        classes, test = open_part(name, entry.data, entry.data.split, is_classified)
        train = (
            None if is_classified else open_part(name, entry.data, entry.data.train_split, False)[1]
        )
        if entry.type == "knn":
            knn.check(entry, train.num_examples)
        opened[name] = Evaluation(entry, classes, test, train)
    return opened


def make_steps(config, model) -> Steps:
    def apply_fn(params, image):
        return model.apply({"params": params}, image)

    def features_fn(params, image):
        return pretrained.features(model, params, image)

    classify = classification.make_eval_step(
        apply_fn, config.loss, model.num_classes, model.normalize
    )
    return Steps(
        jax.jit(classify),
        jax.jit(features.make_step(features_fn, model.normalize)),
        model.num_classes,
    )


def run(
    opened: dict[str, Evaluation],
    steps: Steps,
    params,
    wanted: Callable[[str], bool],
    until: Callable = iter,
) -> dict[str, float]:
    """Metrics "eval/NAME/top1" and so on for the evaluations that are wanted now; `until`: passes
    their batches on.
    """
    scalars, held = {}, {}

    def batches_of(name: str, part: Part):
        return until(watchdog.each(part.batches(), f"evaluation {name}"))

    def features_of(name: str, part: Part) -> features.Features:
        if part.key not in held:
            held[part.key] = features.collect(steps.features, params, batches_of(name, part))
        return held[part.key]

    for name in filter(wanted, opened):
        one = opened[name]
        if one.settings.type in ON_BATCHES:
            given = batches_of(name, one.test)
            if one.settings.among == "present":
                among = np.isin(np.arange(steps.num_classes), one.test.labels())
                given = (batch | dict(among=among) for batch in given)
            result = ON_BATCHES[one.settings.type](steps.classify, params, given)
        else:
            both = features_of(name, one.train), features_of(name, one.test)
            result = ON_FEATURES[one.settings.type](*both, one.num_classes, one.settings)
        scalars |= {f"eval/{name}/{key}": value for key, value in result.items()}
        log.info(
            "eval %s: %s", name, ", ".join(f"{key} {value:.6g}" for key, value in result.items())
        )
    return scalars
