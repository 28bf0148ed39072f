"""Images that are there more than once: the same bytes, or almost the same pixels.

Almost the same are images whose difference hashes (N. Krawetz, "Kind of Like That", 2013: for each
of 8 x 8 neighbours in a thumbnail of 9 x 8 grey values, whether the left one is brighter) differ
in at most 3 of 64 bits, which is the threshold of Manku et al., "Detecting Near-Duplicates for Web
Crawling" (WWW 2007), who find such pairs as here: 3 bits can't be in all of 4 bands, so that one
band is equal, and only images with an equal band are compared. As smooth or dark images may have
the same hash by chance, the thumbnails are compared, too.
"""

from collections.abc import Iterator

import numpy as np

BITS = 3  # that may differ
BANDS = BITS + 1
LEVELS = 6.0  # of 255, by which two thumbnails may differ on average
MOST_PAIRS = 100_000  # that are listed


def hashes(thumbs: np.ndarray) -> np.ndarray:
    """Difference hashes, uint64 [n], of thumbnails uint8 [n, 8, 9]."""
    brighter = thumbs[:, :, :-1] > thumbs[:, :, 1:]
    packed = np.packbits(brighter.reshape(len(thumbs), -1), axis=1)
    return packed.view(">u8").astype(np.uint64).reshape(-1)


def band(bits: np.ndarray, number: int) -> np.ndarray:
    """Every fourth bit of a hash: neighbours in an image are alike, and bands must not be."""
    spread = np.unpackbits(bits[:, None].view(np.uint8), axis=1)[:, number::BANDS]
    return np.packbits(spread, axis=1).view(np.uint16).reshape(-1)


def close_pairs(keys: np.ndarray, grey: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of positions with equal keys and means of grey at most LEVELS apart, in blocks: each
    time all pairs that are equally far from each other in the order of both.
    """
    order = np.lexsort((grey, keys))
    keys = keys[order]
    grey = grey[order]
    starts = np.arange(len(keys))
    distance = 0
    while len(starts):
        distance += 1
        starts = starts[starts + distance < len(keys)]
        ends = starts + distance
        starts = starts[(keys[starts] == keys[ends]) & (grey[ends] - grey[starts] <= LEVELS)]
        yield order[starts], order[starts + distance]


def groups(digests: np.ndarray) -> list[np.ndarray]:
    """The positions of each digest that occurs more than once."""
    order = np.argsort(digests, kind="stable")
    ends = np.flatnonzero(np.diff(digests[order])) + 1
    return [part for part in np.split(order, ends) if len(part) > 1]


def near_pairs(thumbs: np.ndarray) -> np.ndarray:
    """Pairs of thumbnails that are almost the same, int64 [pairs, 2]; at most about MOST_PAIRS.

    Args:
      thumbs: uint8 [n, 8, 9].
    """
    if not len(thumbs):
        return np.empty((0, 2), np.int64)
    bits = hashes(thumbs)
    grey = thumbs.mean((1, 2), dtype=np.float32)
    found: set[tuple[int, int]] = set()
    for number in range(BANDS):
        for first, second in close_pairs(band(bits, number), grey):
            close = np.bitwise_count(bits[first] ^ bits[second]) <= BITS
            first = first[close]
            second = second[close]
            levels = np.abs(thumbs[first].astype(np.int16) - thumbs[second]).mean((1, 2))
            pairs = np.stack([first, second], axis=1)[levels <= LEVELS]
            found.update(map(tuple, np.sort(pairs, axis=1).tolist()))
            if len(found) > MOST_PAIRS:
                break
    return np.asarray(sorted(found), np.int64).reshape(-1, 2)
