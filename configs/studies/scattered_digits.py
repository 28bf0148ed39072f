"""A data set of any size that needs no network, for studies on a laptop: two scanned digits at
random places on a canvas of 32 x 32 pixels. The class is the left digit.

`data.name=scattered_digits:ScatteredDigits`, with the splits train, of 131,072 images, val, of
1,024, and test, of 2,048. Those of val and test are made of scans that train does not have. An
image is a function of its number: `train[:1000]` are the first thousand of `train`.
"""

import numpy as np

from vit_jax.data.sources import digits

SIDE = 32  # of an image, in pixels
SCALE = 2  # pixels per pixel of a scan
APART = 4  # pixels from the left edge of a digit to that of the other, at least
IMAGES = dict(train=131_072, val=1024, test=2048)


class ScatteredDigits:
    """Images uint8 [32, 32, 3] with their labels; an image is drawn when it is read."""

    class_names = digits.NAMES

    def __init__(self, split: str):
        scans, classes, parts = digits.scans()
        self.fingerprint = f"scattered digits, {split}"
        self.scans = scans[parts[split]].repeat(SCALE, 1).repeat(SCALE, 2)
        self.size = self.scans.shape[1]  # of a digit, in pixels
        rng = np.random.default_rng([0, *split.encode()])
        pairs = (IMAGES[split], 2)  # left, right
        free = SIDE - self.size
        self.drawn = rng.integers(len(self.scans), size=pairs)
        self.rows = rng.integers(free + 1, size=pairs)
        left, right = np.sort(rng.integers(free - APART + 1, size=pairs)).T
        self.columns = np.stack([left, right + APART], 1)
        self.labels = classes[parts[split]][self.drawn[:, 0]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int):
        image = np.zeros((SIDE, SIDE), np.uint8)
        for digit, row, column in zip(self.drawn[i], self.rows[i], self.columns[i], strict=True):
            window = image[row : row + self.size, column : column + self.size]
            np.maximum(window, self.scans[digit], out=window)
        return np.repeat(image[:, :, None], 3, 2), self.labels[i]
