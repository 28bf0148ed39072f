"""What is known of one key of a config, in one declaration; `defaults.py` declares all of them."""

import dataclasses
import re
from collections.abc import Mapping

LARGEST = 2**31 - 1
DROP = (0.0, 0.999)  # range of rates
DTYPES = ("float32", "bfloat16")
COUNT = (1, LARGEST)
METHODS = {  # of resizing
    "bilinear": "",
    "bicubic": "antialiased",
    "bilinear_tf1": "as in TensorFlow 1, without half-pixel centres",
    "bilinear_pillow": "antialiased and rounded, as by Pillow, torchvision and timm",
    "bicubic_pillow": "the same, bicubic",
}
OWN = re.compile(r"([^\W\d]\w*)(\.[^\W\d]\w*)*:[^\W\d]\w*")
# What stands before the colon in names of data sets: folder:PATH, and TFDS's huggingface:NAME.
NO_MODULES = ("folder", "tars", "csv", "vtab", "huggingface")


def is_own(value) -> bool:
    """Whether a value is MODULE:ATTRIBUTE, the name of a part of the user's own."""
    match = OWN.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[1] not in NO_MODULES


@dataclasses.dataclass(frozen=True)
class Key:
    """One key: what it means, which values it may have, and when it counts."""

    default: object
    meaning: str
    choices: Mapping | tuple = ()  # the allowed values; as a mapping, with what each means
    within: tuple[float, float] = (0, LARGEST)  # smallest and largest number, both allowed
    items: type | None = None  # type of the numbers in a tuple of any length
    pairs: tuple[type, type] | None = None  # types of the two in each pair of a tuple
    # Key -> values: with another value of that key this one has no effect, and is an error.
    only_if: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    resume: bool = False  # a run may be continued with another value
    per_host: bool = False  # may differ between the processes of one run
    state: bool = False  # shapes the state, so a branch of a run has the same value
    train_only: bool = False  # of the model, but without effect at evaluation
    like_weights: bool = (
        False  # changes the function of a model but no shape: must match the weights
    )
    # None with init_from if it is not set: the run has what the model of the weights has.
    of_weights: bool = False
    vtab: bool = True  # has an effect in `vit_jax.vtab`
    # If a part of the user's own may stand here, MODULE:ATTRIBUTE: what it may ask for besides
    # `config`; see own_parts.py.
    own: tuple[str, ...] = ()

    def check(self, value):
        """Returns `value` in the type of the default.

        Raises:
          ValueError: wrong type, range or choice; the message follows the name of the key.
        """
        if type(self.default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(self.default):
            raise ValueError(f" expects {type(self.default).__name__}, got {value!r}")
        if self.pairs:
            return self.check_pairs(value)
        if self.items:
            return tuple(self.check_item(item) for item in value)
        if self.own and type(value) is tuple:
            return self.check_own(value)
        if self.choices and value not in self.choices and not (self.own and is_own(value)):
            raise ValueError(f"={value!r} is not one of {self.known()}")
        if type(value) in (int, float) and not self.is_within(value):
            low, high = self.within
            raise ValueError(f"={value} is outside {low} to {high}")
        return value

    def is_within(self, number: float) -> bool:
        low, high = self.within
        return low <= number <= high

    def check_item(self, item):
        if type(item) not in (int, self.items) or not self.is_within(item):
            low, high = self.within
            kind = self.items.__name__
            raise ValueError(f" has {item!r}, not a number ({kind}) from {low} to {high}")
        return self.items(item)

    def known(self) -> str:
        """What may be chosen."""
        more = ", or MODULE:FUNCTION of your own" if self.own else ""
        return ", ".join(map(str, self.choices)) + more

    def check_own(self, names: tuple) -> tuple:
        for name in names:
            if not is_own(name) and not (isinstance(name, str) and name in self.choices):
                what = f"one of {self.known()}" if self.choices else "MODULE:FUNCTION"
                raise ValueError(f" has {name!r}, which is not {what}")
        return names

    def check_pairs(self, pairs) -> tuple:
        """The pairs as a tuple of tuples."""
        first, second = self.pairs
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or type(pair[0]) is not first:
                form = "(text, number)" if first is str else "(step, factor)"
                raise ValueError(f" expects a tuple of {form} pairs, got {pairs!r}")
            if type(pair[1]) not in (int, second) or not self.is_within(pair[1]):
                low, high = self.within
                raise ValueError(f" has a number {pair[1]!r}, not one from {low} to {high}")
        return tuple((left, second(right)) for left, right in pairs)


@dataclasses.dataclass(frozen=True)
class FreeKey(Key):
    """A key of the user's own: any value that JSON can hold."""

    def check(self, value):
        if isinstance(value, list | tuple):
            return tuple(map(self.check, value))
        if value is not None and type(value) not in (bool, int, float, str):
            raise ValueError(f" has a {type(value).__name__}, which JSON can't hold")
        return value


def together(keys: Mapping, **facts) -> dict:
    """A group of keys, at any depth, that have facts in common."""
    return {
        name: dataclasses.replace(key, **facts) if isinstance(key, Key) else together(key, **facts)
        for name, key in keys.items()
    }
