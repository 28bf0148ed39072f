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


def check_alike(names: Iterable[str], where: str, what: str = "classes") -> None:
    """Raises UserError for two names that look the same; warns of those that differ in case only.

    Args:
      names: distinct.
    """
    seen: dict[str, str] = {}
    folded: dict[str, list[str]] = {}
    for name in sorted(names):
        text = visible(name)
        other = seen.setdefault(text, name)
        if other is not name:
            raise UserError(
                f"{where} has the {what} {other!a} and {name!a}, which look the same: "
                "they differ only in white space, invisible characters or Unicode normalisation; "
                "give them one name"
            )
        folded.setdefault(text.casefold(), []).append(name)
    pairs = [names for names in folded.values() if len(names) > 1]
    if pairs:
        log.warning(
            "%s has %s that differ only in upper and lower case, such as %s: if they are the same, "
            "give them one name",
            where,
            what,
            " and ".join(map(repr, pairs[0][:2])),
        )
