"""VTAB's 19 tasks a second time, as the positions of their examples, to compare
`data/sources/vtab_tasks.py` with.

Written from google-research/task_adaptation's tests and scenic's vtab configs, which agree on all
of this.
"""

# Task -> (TFDS data set with its config, classes, {part: [(TFDS split, from, to), ...]}).
FULL = {
    "caltech101": ("caltech101", 102, dict(train=3_060, test=6_084)),
    "cifar100": ("cifar100", 100, dict(train=50_000, test=10_000)),
    "dtd": ("dtd", 47, dict(train=1_880, validation=1_880, test=1_880)),
    "oxford_flowers102": (
        "oxford_flowers102",
        102,
        dict(train=1_020, validation=1_020, test=6_149),
    ),
    "oxford_iiit_pet": ("oxford_iiit_pet", 37, dict(train=3_680, test=3_669)),
    "svhn": ("svhn_cropped", 10, dict(train=73_257, test=26_032)),
    "sun397": ("sun397/tfds", 397, dict(train=76_128, validation=10_875, test=21_750)),
    "patch_camelyon": ("patch_camelyon", 2, dict(train=262_144, validation=32_768, test=32_768)),
    "eurosat": ("eurosat/rgb", 10, dict(train=27_000)),
    "resisc45": ("resisc45", 45, dict(train=31_500)),
    "diabetic_retinopathy": (
        "diabetic_retinopathy_detection/btgraham-300",
        5,
        dict(train=35_126, validation=10_906, test=42_670),
    ),
    "clevr_count_all": ("clevr", 8, dict(train=70_000, validation=15_000, test=15_000)),
    "clevr_closest_object_distance": (
        "clevr",
        6,
        dict(train=70_000, validation=15_000, test=15_000),
    ),
    "dmlab": ("dmlab", 6, dict(train=65_550, validation=22_628, test=22_735)),
    "kitti_closest_vehicle_distance": ("kitti", 4, dict(train=6_347, validation=423, test=711)),
    "dsprites_label_x_position": ("dsprites", 16, dict(train=737_280)),
    "dsprites_label_orientation": ("dsprites", 16, dict(train=737_280)),
    "smallnorb_label_azimuth": ("smallnorb", 18, dict(train=24_300, test=24_300)),
    "smallnorb_label_elevation": ("smallnorb", 9, dict(train=24_300, test=24_300)),
}

# Where val200 begins, what the full train and validation are, and what the score is measured on.
PARTS = {
    "caltech101": (
        ("train", 2_754),
        [("train", 0, 2_754)],
        [("train", 2_754, 3_060)],
        [("test", 0, 6_084)],
    ),
    "cifar100": (
        ("train", 45_000),
        [("train", 0, 45_000)],
        [("train", 45_000, 50_000)],
        [("test", 0, 10_000)],
    ),
    "dtd": (
        ("validation", 0),
        [("train", 0, 1_880)],
        [("validation", 0, 1_880)],
        [("test", 0, 1_880)],
    ),
    "oxford_flowers102": (
        ("validation", 0),
        [("train", 0, 1_020)],
        [("validation", 0, 1_020)],
        [("test", 0, 6_149)],
    ),
    "oxford_iiit_pet": (
        ("train", 2_944),
        [("train", 0, 2_944)],
        [("train", 2_944, 3_680)],
        [("test", 0, 3_669)],
    ),
    "svhn": (
        ("train", 65_931),
        [("train", 0, 65_931)],
        [("train", 65_931, 73_257)],
        [("test", 0, 26_032)],
    ),
    "sun397": (
        ("validation", 0),
        [("train", 0, 76_128)],
        [("validation", 0, 10_875)],
        [("test", 0, 21_750)],
    ),
    "patch_camelyon": (
        ("validation", 0),
        [("train", 0, 262_144)],
        [("validation", 0, 32_768)],
        [("test", 0, 32_768)],
    ),
    "eurosat": (
        ("train", 16_200),
        [("train", 0, 16_200)],
        [("train", 16_200, 21_600)],
        [("train", 21_600, 27_000)],
    ),
    "resisc45": (
        ("train", 18_900),
        [("train", 0, 18_900)],
        [("train", 18_900, 25_200)],
        [("train", 25_200, 31_500)],
    ),
    "diabetic_retinopathy": (
        ("validation", 0),
        [("train", 0, 35_126)],
        [("validation", 0, 10_906)],
        [("test", 0, 42_670)],
    ),
    "clevr_count_all": (
        ("train", 63_000),
        [("train", 0, 63_000)],
        [("train", 63_000, 70_000)],
        [("validation", 0, 15_000)],
    ),
    "dmlab": (
        ("validation", 0),
        [("train", 0, 65_550)],
        [("validation", 0, 22_628)],
        [("test", 0, 22_735)],
    ),
    "kitti_closest_vehicle_distance": (
        ("validation", 0),
        [("train", 0, 6_347)],
        [("validation", 0, 423)],
        [("test", 0, 711)],
    ),
    "dsprites_label_x_position": (
        ("train", 589_824),
        [("train", 0, 589_824)],
        [("train", 589_824, 663_552)],
        [("train", 663_552, 737_280)],
    ),
    "smallnorb_label_azimuth": (
        ("test", 0),
        [("train", 0, 24_300)],
        [("test", 0, 12_150)],
        [("test", 12_150, 24_300)],
    ),
}
PARTS["clevr_closest_object_distance"] = PARTS["clevr_count_all"]
PARTS["dsprites_label_orientation"] = PARTS["dsprites_label_x_position"]
PARTS["smallnorb_label_elevation"] = PARTS["smallnorb_label_azimuth"]


def positions(name: str) -> dict[str, list[tuple[str, int, int]]]:
    """Every part of a task as (TFDS split, from, to); the larger ones in the order train, then
    validation.
    """
    (split, start), train, val, test = PARTS[name]
    val200 = [(split, start, start + 200)]
    together = train + val
    if train[0][0] == val[0][0]:
        together = [(train[0][0], train[0][1], val[0][2])]
    train800 = [("train", 0, 800)]
    parts = dict(train800=train800, val200=val200, train800val200=train800 + val200)
    return parts | dict(train=train, val=val, trainval=together, test=test)


def nearest_bin(value: float, edges: list[float]) -> int:
    """How many edges lie below a value; one at the value does not."""
    return len([edge for edge in edges if edge < value])


def label_of(name: str, example: dict) -> int:
    """The label by the words of the specification, from a decoded example."""
    if name == "clevr_count_all":
        return len(example["objects"]) - 3
    if name == "clevr_closest_object_distance":
        return nearest_bin(
            min(o["pixel_coords"][2] for o in example["objects"]), [8.0, 8.5, 9.0, 9.5, 10.0]
        )
    if name == "kitti_closest_vehicle_distance":
        depths = [o["location"][2] for o in example["objects"] if o["type"] in (0, 1, 2)]
        return nearest_bin(min(depths), [8.0, 20.0]) if depths else 3
    if name == "dsprites_label_x_position":
        return example["label_x_position"] // 2
    if name == "dsprites_label_orientation":
        return example["label_orientation"] * 2 // 5
    return example[
        {
            "smallnorb_label_azimuth": "label_azimuth",
            "smallnorb_label_elevation": "label_elevation",
        }.get(name, "label")
    ]
