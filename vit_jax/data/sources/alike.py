"""Names that look the same: of classes, splits and columns."""

import logging
import unicodedata
from collections.abc import Iterable

from vit_jax.errors import UserError

log = logging.getLogger(__name__)


def visible(name: str) -> str:
    """What is seen of a name: normalised (NFC), without invisible characters, and with single
    blanks between words.
    """
    text = " ".join(unicodedata.normalize("NFC", name).split())
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf")).strip()


def alike(names: Iterable[str]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(pairs of names that look the same, groups of names that differ in case only).

    Args:
      names: distinct.
    """
    seen: dict[str, str] = {}
    folded: dict[str, list[str]] = {}
    same = []
    for name in sorted(names):
        text = visible(name)
        other = seen.setdefault(text, name)
        if other is not name:
            same.append((other, name))
        else:
            folded.setdefault(text.casefold(), []).append(name)
    return same, [names for names in folded.values() if len(names) > 1]


def same_problem(pair: tuple[str, str], where: str, what: str = "classes") -> str:
    return (
        f"{where} has the {what} {pair[0]!a} and {pair[1]!a}, which look the same: they differ "
        "only in white space, invisible characters or Unicode normalisation; give them one name"
    )


def case_problem(names: list[str], where: str, what: str = "classes") -> str:
    return (
        f"{where} has {what} that differ only in upper and lower case, such as "
        f"{' and '.join(map(repr, names[:2]))}: if they are the same, give them one name"
    )


def check_alike(names: Iterable[str], where: str, what: str = "classes") -> None:
    """Raises UserError for two names that look the same; warns of those that differ in case only.

    Args:
      names: distinct.
    """
    same, cases = alike(names)
    if same:
        raise UserError(same_problem(same[0], where, what))
    if cases:
        log.warning("%s", case_problem(cases[0], where, what))
