"""A data set of any size that needs no network, for studies on a laptop: scanned digits at random
places on a canvas of 32 x 32 pixels. The class is the digit that is furthest to the left.

`data.name=scattered_digits:split`, with the splits train, of 131,072 images, val and test, of 4,096
each. Those of val and test are made of scans that train does not have. An image is a function of
its number: `train[:1000]` are the first thousand of `train`.
"""

import numpy as np

from vit_jax.data.sources import digits

SIDE = 32  # of an image, in pixels
SCALE = 2  # pixels per pixel of a scan
DIGITS = 2  # in an image
IMAGES = dict(train=131_072, val=4096, test=4096)


class ScatteredDigits:
    """Images uint8 [32, 32, 3] with their labels, drawn when they are read."""

    class_names = digits.NAMES

    def __init__(self, split: str):
        with np.load(digits.FILE, allow_pickle=False) as data:
            scans = data["images"][data[split]]
            classes = data["labels"][data[split]]
        self.fingerprint = f"scattered digits {split}"
        scans = np.round(scans * (255 / 16)).astype(np.uint8)
        self.scans = scans.repeat(SCALE, 1).repeat(SCALE, 2)
        rng = np.random.default_rng([0, *split.encode()])
        count = IMAGES[split]
        self.drawn = rng.integers(len(scans), size=(count, DIGITS))
        side = self.scans.shape[1]
        self.places = rng.integers(SIDE - side + 1, size=(count, DIGITS, 2))
        first = self.places[:, :, 1].argmin(1)
        self.labels = classes[self.drawn[np.arange(count), first]].astype(np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int):
        image = np.zeros((SIDE, SIDE), np.uint8)
        side = self.scans.shape[1]
        for scan, (row, column) in zip(self.drawn[i], self.places[i], strict=True):
            window = image[row : row + side, column : column + side]
            np.maximum(window, self.scans[scan], out=window)
        return np.repeat(image[:, :, None], 3, 2), self.labels[i]


def split(split: str) -> ScatteredDigits:
    return ScatteredDigits(split)
