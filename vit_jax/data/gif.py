"""The first frame of a GIF: TensorFlow's decoder would unpack all of them, 3 KB for each million
pixels, before it takes the first one.

Format: https://www.w3.org/Graphics/GIF/spec-gif89a.txt
"""

SCREEN = 13  # bytes of the header and the logical screen descriptor
EXTENSION = 0x21
FRAME = 0x2C
DESCRIPTOR = 10  # bytes
END = b";"


def table_size(flags: int) -> int:
    """Bytes of the table of colours that the flags of a descriptor announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def end_of_blocks(encoded: bytes, position: int) -> int:
    """The position after a sequence of sub-blocks, each with its length before it."""
    while encoded[position]:
        position += encoded[position] + 1
    return position + 1


def first_frame(encoded: bytes) -> tuple[bytes, int]:
    """(a GIF up to its first frame, the pixels of the frame and of the screen, the larger of both).

    Raises:
      IndexError: it ends before.
    """
    screen = int.from_bytes(encoded[6:8], "little") * int.from_bytes(encoded[8:10], "little")
    position = SCREEN + table_size(encoded[10])
    while encoded[position] == EXTENSION:
        position = end_of_blocks(encoded, position + 2)
    if encoded[position] != FRAME:
        raise IndexError("it has no frame")
    width, height = (encoded[position + i] + 256 * encoded[position + i + 1] for i in (5, 7))
    start = position + DESCRIPTOR + table_size(encoded[position + 9])
    end = end_of_blocks(encoded, start + 1)
    return encoded[:end] + END, max(screen, width * height)
