"""An object on a store as a file to read from start to end, in large blocks, one of them ahead."""

import io
from collections.abc import Callable

BLOCK = 1 << 23  # bytes


class ObjectFile(io.RawIOBase):
    """A binary file to read, with seek and tell."""

    def __init__(self, size: int, request: Callable):
        """`request(start, stop)` begins to read a range, and returns a function that waits for it
        and returns (content, stamp).
        """
        self.size = size
        self.request = request
        self.position = 0
        self.blocks = {}  # number -> content, or a function that waits for it

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(start + offset, 0)
        return self.position

    def block(self, number: int) -> bytes:
        self.blocks = {key: self.blocks[key] for key in self.blocks if 0 <= key - number <= 1}
        for key in (number, number + 1):
            if key not in self.blocks and key * BLOCK < self.size:
                stop = min((key + 1) * BLOCK, self.size)
                self.blocks[key] = self.request(key * BLOCK, stop)
        if callable(self.blocks[number]):
            self.blocks[number] = self.blocks[number]()[0]
        return self.blocks[number]

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self.position + size, self.size)
        pieces = []
        while self.position < stop:
            start = self.position % BLOCK
            piece = self.block(self.position // BLOCK)[start : start + stop - self.position]
            pieces.append(piece)
            self.position += len(piece)
        return b"".join(pieces)

    def readinto(self, buffer) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
