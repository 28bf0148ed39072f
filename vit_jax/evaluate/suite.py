"""The evaluations of a config: their data are opened once, then they run on any parameters, during
training or afterwards.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np

from vit_jax.cli.spool import Files
from vit_jax.config import is_own
from vit_jax.config.own_parts import OwnPart
from vit_jax.distributed import waits, watchdog
from vit_jax.errors import UserError
from vit_jax.evaluate import classification, features, fewshot, knn, linear_probe, own
from vit_jax.evaluate.mistakes import records as record
from vit_jax.evaluate.splits import Split, Splits
from vit_jax.models import losses, preparation
from vit_jax.models.classifier import Classifier
from vit_jax.weights import load as pretrained
from vit_jax.weights.pretrained import SIGMOID

log = logging.getLogger("vit_jax.evaluate")

ON_BATCHES = {"classification": classification.evaluate}
ON_FEATURES = {
    "fewshot": fewshot.evaluate,
    "knn": knn.evaluate,
    "linear_probe": linear_probe.evaluate,
}


@dataclasses.dataclass(frozen=True)
class Steps:
    """A model, and compiled functions of (params, batch): sums of the classification, frozen
    features, logits, and records of the classification.
    """

    model: Classifier
    classify: Callable | None  # None: the model has no classes
    features: Callable
    logits: Callable | None = None
    record: Callable | None = None  # see mistakes/records.py


@dataclasses.dataclass(frozen=True)
class Evaluation:
    settings: object  # an entry of `config.evals`
    test: Split
    train: Split | None  # of evaluations that learn from features
    part: OwnPart | None = None  # if it is one of the user's own


def open_all(
    config, mesh, class_names: tuple[str, ...], num_classes: int, files: Files | None = None
) -> dict[str, Evaluation]:
    """Opens the data of every entry of `config.evals`.

    Args:
      class_names, num_classes: of the model; the classes of a classification are matched with them.
      files: of the workdir, where skipped examples are listed.
    """
    splits = Splits(config, mesh, class_names, num_classes, files)
    opened = {}
    for name, entry in config.evals.items():
        use = f"evals.{name}"
        part = own.part_of(config, name) if is_own(entry.type) else None
        is_classified = own.is_classified(part) if part else entry.type in ON_BATCHES
        if not num_classes:
            check_without_head(use, entry, part)
            is_classified = False
        learns = bool(part.wanted & own.FROM_TRAIN) if part else entry.type in ON_FEATURES
        test = splits.open(use, entry.data, entry.data.split, is_classified)
        train = None
        if learns:
            split = entry.data.train_split
            train = splits.open(use, entry.data, split, is_classified, is_learned=True)
        if entry.type == "knn":
            knn.check(entry, train.num_examples)
        if test.source.set_size and entry.get("among") == "present":
            raise UserError(
                f"config key {use}.among=present needs images with one label, but those of the "
                "data have several: choose all"
            )
        opened[name] = Evaluation(entry, test, train, part)
    return opened


def check_without_head(use: str, entry, part: OwnPart | None) -> None:
    """Raises UserError if an evaluation needs the classes of a model that has none."""
    if entry.type in ON_BATCHES or (part and "logits" in part.wanted):
        raise UserError(
            f"config key {use}.type={entry.type} needs classes, but the model has no head, as "
            "after training without labels: choose knn, linear_probe or fewshot, such as "
            f"--config.{use}.type=knn"
        )


def make_steps(config, model) -> Steps:
    """The steps of a model; the log says how images are prepared for it.

    Raises:
      UserError: `config.evals` asks for what can't be done to them.
    """
    for name, entry in config.evals.items():
        how = preparation.configured(entry.data, model.image_size, model)
        log.info("images of evals.%s: %s", name, how)

    def apply_fn(params, image):
        return model.apply({"params": params}, image)

    def features_fn(params, image):
        return pretrained.features(model, params, image)

    logits = features.make_step(apply_fn, model.normalize)
    extract = features.make_step(features_fn, model.normalize)
    classify = None
    recorded = None
    if model.num_classes:
        loss = losses.make_loss(config, model.num_classes)
        how = (apply_fn, loss, model.num_classes, model.normalize)
        classify = jax.jit(classification.make_eval_step(*how))
        examples = classification.make_example_step(*how)
        recorded = jax.jit(record.make_step(examples, config.loss in SIGMOID))
    return Steps(model, classify, jax.jit(extract), jax.jit(logits), recorded)


class Pass:
    """Evaluations of some parameters, which share features and logits."""

    def __init__(
        self,
        opened: dict[str, Evaluation],
        steps: Steps,
        params,
        until: Callable,
        records: dict[str, record.Records] | None,
    ):
        self.opened = opened
        self.steps = steps
        self.params = params
        self.until = until
        self.records = records
        self.collected: dict[tuple, features.Features] = {}

    def batches(self, name: str, split: Split) -> Iterator[dict]:
        return self.until(
            f"a batch of evaluation {name}",
            watchdog.each(split.batches(self.steps.model), f"evaluation {name}"),
        )

    def collect(self, name: str, split: Split, what: str = "features") -> features.Features:
        """The features, or "logits", of a split."""
        if (what, split.key) not in self.collected:
            step = getattr(self.steps, what)
            batches = self.batches(name, split)
            self.collected[what, split.key] = features.collect(step, self.params, batches, what)
        return self.collected[what, split.key]

    def metrics(self, name: str) -> dict[str, float]:
        evaluation = self.opened[name]
        settings = evaluation.settings
        test = evaluation.test
        if evaluation.part:
            return self.own_metrics(name, evaluation)
        if settings.type in ON_BATCHES:
            batches = self.classified_batches(name, evaluation)
            if self.records is not None:
                found = record.collect(self.steps.record, self.params, batches, test.num_examples)
                self.records[name] = found
                return found.metrics()
            return ON_BATCHES[settings.type](self.steps.classify, self.params, batches)
        train_features = self.collect(name, evaluation.train)
        test_features = self.collect(name, test)
        evaluate = ON_FEATURES[settings.type]
        return evaluate(train_features, test_features, test.num_classes, settings)

    def classified_batches(self, name: str, evaluation: Evaluation) -> Iterator[dict]:
        """With `among` if only the classes that are present are predicted."""
        batches = self.batches(name, evaluation.test)
        if evaluation.settings.among != "present":
            return batches
        classes = np.arange(self.steps.model.num_classes)
        among = np.isin(classes, evaluation.test.labels())
        return (batch | dict(among=among) for batch in batches)

    def own_metrics(self, name: str, evaluation: Evaluation) -> dict[str, float]:
        """Those of a part of the user's own, from what it has parameters for."""
        part = evaluation.part
        test = evaluation.test
        train = evaluation.train
        has_classes = own.is_classified(part) and self.steps.model.num_classes
        classes = self.steps.model if has_classes else test
        ready = dict(
            num_classes=classes.num_classes,
            settings=evaluation.settings,
            model=self.steps.model,
            params=self.params,
        )
        labelled = "logits" if "logits" in part.wanted else "features"
        later = dict(
            logits=lambda: self.collect(name, test, "logits").x,
            features=lambda: self.collect(name, test).x,
            label=lambda: self.collect(name, test, labelled).label,
            train_features=lambda: self.collect(name, train).x,
            train_label=lambda: self.collect(name, train).label,
            batches=lambda: self.batches(name, test),
        )
        return own.run(part, ready, later)


def run(
    opened: dict[str, Evaluation],
    steps: Steps,
    params,
    wanted: Callable[[str], bool],
    until: Callable = waits.each,
    records: dict[str, record.Records] | None = None,
) -> dict[str, float]:
    """Runs evaluations and returns their metrics, "eval/NAME/top1" and so on.

    Args:
      wanted: f(name), whether to run an evaluation.
      until: f(what, batches) -> batches; may end early, by an exception.
      records: if given, it receives those of every classification by name.
    """
    this = Pass(opened, steps, params, until, records)
    scalars = {}
    for name in filter(wanted, opened):
        result = this.metrics(name)
        scalars |= {f"eval/{name}/{key}": value for key, value in result.items()}
        text = ", ".join(f"{key} {value:.6g}" for key, value in result.items())
        log.info("eval %s: %s", name, text)
    return scalars
