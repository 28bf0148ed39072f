"""What `from_pretrained` returns: a pair that also knows class names and what was changed."""

import html
import math

import jax
import numpy as np

from vit_jax.errors import printable
from vit_jax.models import preparation
from vit_jax.models.classifier import Classifier
from vit_jax.weights.adapt import Report

SIGMOID = ("sigmoid_xent", "multilabel_xent")  # losses for which each class has a probability alone
SHOWN = 8  # class names


class Pretrained(tuple):
    """The pair (model, params), and what else is known of the weights.

    A notebook shows it as a table: what was loaded, resampled, dropped and new.

    Attributes:
      model: logits = model.apply({"params": params}, image).
      params: by vision_transformer's names, numpy.
      class_names: of the classes that the logits stand for; one without a name is "class 7".
      report: what happened to every parameter; see `vit_jax.weights.adapt.Report`.
      path: where the weights were read from.
      loss: of their training, "" if that is not known.
    """

    def __new__(
        cls,
        model: Classifier,
        params: dict,
        class_names: tuple[str, ...] = (),
        report: Report | None = None,
        path: str = "",
        loss: str = "",
    ):
        self = super().__new__(cls, (model, params))
        self.model = model
        self.params = params
        self.class_names = all_names(class_names, model.num_classes)
        self.report = report or Report()
        self.path = path
        self.loss = loss
        return self

    def __getnewargs__(self):  # for copies and pickles
        return self.model, self.params, self.class_names, self.report, self.path, self.loss

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several classes: probabilities are sigmoids, not a softmax."""
        return self.loss in SIGMOID

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of what one wants to know first."""
        model = self.model
        count = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(self.params))
        sizes = f"{type(model).__name__}, {count:,} parameters"
        if model.depth:
            sizes += f", {model.depth} layers of width {model.width}"
        facts = [("weights", self.path), ("model", sizes)]
        facts.append(("classes", self.shown_names() or "none: the model has no head"))
        facts.append(("images", str(preparation.expected(model))))
        return [(name, value) for name, value in facts if value]

    def shown_names(self) -> str:
        if not self.class_names:
            return ""
        names = ", ".join(self.class_names[:SHOWN])
        more = ", ..." if len(self.class_names) > SHOWN else ""
        return f"{len(self.class_names):,}: {names}{more}"

    def __repr__(self) -> str:
        facts = [f"{name:<8} {value}" for name, value in self.facts()]
        return printable("\n".join([*facts, str(self.report)]))

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [
            (f"<b>{name}</b>", html.escape(printable(value)), "") for name, value in self.facts()
        ]
        rows += [tuple(map(html.escape, row)) for row in self.report.rows()]
        cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def all_names(known: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Names of `count` classes; one without a name is called by its number."""
    known = tuple(known)[:count]
    return known + tuple(f"class {i}" for i in range(len(known), count))
