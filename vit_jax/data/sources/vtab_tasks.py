"""The 19 tasks of VTAB as rows of a table: the data set, its parts and their sizes, the label. This
file does not import TensorFlow.

Sources: splits, counts and label rules of VTAB (arXiv 1910.04867) are those of
google-research/task_adaptation, and the 800 + 200 examples of VTAB-1k are slices of the order in
which TFDS writes a data set. Whether images are flipped and cropped in training follows BiT (arXiv
1912.11370, supplement F).
"""

import dataclasses
from collections.abc import Mapping

from vit_jax.errors import UserError

GROUPS = ("natural", "specialized", "structured")
PREFIX = "vtab:"  # of a task's name in data.name, where other data sets may stand, too
# Side of the images that random crops are taken from, relative to that of the crops: 448 for 384
# (BiT, arXiv 1912.11370, supplement F).
RESIZE_RATIO = 7 / 6


@dataclasses.dataclass(frozen=True)
class Task:
    """`splits`: name -> (TFDS split expression, number of examples). `label`: a feature, or a rule
    in `tfds_labels.RULES`.
    """

    group: str
    builder: str  # of TFDS, with its config if it has several
    versions: tuple[str, ...]  # the first one that is prepared is used
    label: str
    num_classes: int
    splits: Mapping[str, tuple[str, int]]
    crop: bool = True  # whether training takes random crops
    flip: bool = True  # whether training flips images
    scale: int = 1  # factor from stored pixels to the range 0 to 255
    # Number of examples of train that newer code of TFDS omits; they are not among the 1,000.
    left_out: int = 0


def vtab_splits(
    val200: str, train: tuple, val: tuple, trainval: tuple, test: tuple
) -> dict[str, tuple[str, int]]:
    """VTAB's names of the parts; each but `val200` is (expression, number of examples)."""
    small = {"train800": ("train[:800]", 800), "val200": (val200, 200)}
    small["train800val200"] = (f"train[:800]+{val200}", 1_000)
    return small | dict(train=train, val=val, trainval=trainval, test=test)


def from_train(
    train: int, trainval: int, total: int = 0, test: tuple = ()
) -> dict[str, tuple[str, int]]:
    """Parts of TFDS's train: the first `train` examples, then validation up to `trainval`. If there
    is a `total`, the test part goes from there up to it; otherwise `test` is another split.
    """
    whole = f"train[:{trainval}]" if total else "train"
    return vtab_splits(
        f"train[{train}:{train + 200}]",
        (f"train[:{train}]", train),
        (f"train[{train}:{trainval}]", trainval - train),
        (whole, trainval),
        test or (f"train[{trainval}:]", total - trainval),
    )


def own_splits(train: int, val: int, test: int) -> dict[str, tuple[str, int]]:
    """TFDS's own splits train, validation and test."""
    whole = ("train+validation", train + val)
    return vtab_splits(
        "validation[:200]", ("train", train), ("validation", val), whole, ("test", test)
    )


CLEVR = from_train(63_000, 70_000, test=("validation", 15_000))  # the test split has no labels
DSPRITES = from_train(589_824, 663_552, total=737_280)
# Train and test show different objects; validation is the first half of test.
SMALLNORB = vtab_splits(
    "test[:200]",
    ("train", 24_300),
    ("test[:50%]", 12_150),
    ("train+test[:50%]", 36_450),
    ("test[50%:]", 12_150),
)

V2 = ("2.*.*",)
V3 = ("3.*.*",)
V4 = ("4.*.*",)
NATURAL, SPECIALIZED, STRUCTURED = GROUPS


def dsprites(label: str, crop: bool = True) -> Task:
    return Task(STRUCTURED, "dsprites", V2, label, 16, DSPRITES, crop=crop, flip=False, scale=255)


VTAB = {
    "caltech101": Task(
        NATURAL, "caltech101", V3, "label", 102, from_train(2_754, 3_060, test=("test", 6_084))
    ),
    "cifar100": Task(
        NATURAL, "cifar100", V3, "label", 100, from_train(45_000, 50_000, test=("test", 10_000))
    ),
    "dtd": Task(NATURAL, "dtd", V3, "label", 47, own_splits(1_880, 1_880, 1_880)),
    "oxford_flowers102": Task(
        NATURAL, "oxford_flowers102", V2, "label", 102, own_splits(1_020, 1_020, 6_149)
    ),
    # VTAB asks for 3.*.*, which can't be prepared any more; 4.0.0 repairs JPEG files and adds a
    # feature.
    "oxford_iiit_pet": Task(
        NATURAL,
        "oxford_iiit_pet",
        (*V3, *V4),
        "label",
        37,
        from_train(2_944, 3_680, test=("test", 3_669)),
    ),
    "svhn": Task(
        NATURAL, "svhn_cropped", V3, "label", 10, from_train(65_931, 73_257, test=("test", 26_032))
    ),
    # TFDS ignores one file of its own list of train, number 66,481.
    "sun397": Task(
        NATURAL, "sun397/tfds", V4, "label", 397, own_splits(76_128, 10_875, 21_750), left_out=1
    ),
    "patch_camelyon": Task(
        SPECIALIZED, "patch_camelyon", V2, "label", 2, own_splits(262_144, 32_768, 32_768)
    ),
    "eurosat": Task(
        SPECIALIZED, "eurosat/rgb", V2, "label", 10, from_train(16_200, 21_600, total=27_000)
    ),
    "resisc45": Task(
        SPECIALIZED, "resisc45", V3, "label", 45, from_train(18_900, 25_200, total=31_500)
    ),
    "diabetic_retinopathy": Task(
        SPECIALIZED,
        "diabetic_retinopathy_detection/btgraham-300",
        V3,
        "label",
        5,
        own_splits(35_126, 10_906, 42_670),
    ),
    "clevr_count_all": Task(STRUCTURED, "clevr", V3, "clevr_count_all", 8, CLEVR, crop=False),
    "clevr_closest_object_distance": Task(
        STRUCTURED, "clevr", V3, "clevr_closest_object_distance", 6, CLEVR, crop=False
    ),
    "dmlab": Task(
        STRUCTURED, "dmlab", ("2.0.1",), "label", 6, own_splits(65_550, 22_628, 22_735), crop=False
    ),
    "kitti_closest_vehicle_distance": Task(
        STRUCTURED,
        "kitti",
        ("3.1.0",),
        "kitti_closest_vehicle_distance",
        4,
        own_splits(6_347, 423, 711),
        crop=False,
    ),
    "dsprites_label_x_position": dsprites("dsprites_label_x_position", crop=False),
    "dsprites_label_orientation": dsprites("dsprites_label_orientation"),
    "smallnorb_label_azimuth": Task(
        STRUCTURED, "smallnorb", V2, "label_azimuth", 18, SMALLNORB, flip=False
    ),
    "smallnorb_label_elevation": Task(STRUCTURED, "smallnorb", V2, "label_elevation", 9, SMALLNORB),
}


def vtab(name: str) -> Task:
    """The task of VTAB with that name (without `PREFIX`)."""
    if name not in VTAB:
        raise UserError(f"VTAB has no task {name!r}: choose one of {', '.join(VTAB)}")
    return VTAB[name]


def augmentation(name: str) -> dict:
    """The keys of `config.data` by which vtab:TASK is trained with the crops and flips of
    `vtab run`.
    """
    task = vtab(name.removeprefix(PREFIX))
    crop = dict(crop="random", fraction=1 / RESIZE_RATIO) if task.crop else dict(crop="resize")
    return crop | dict(flip=task.flip)
