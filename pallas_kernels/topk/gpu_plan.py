"""One launch of the GPU kernel: what it computes and how its blocks divide the work."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One launch; a block takes one part of one row.

    Attributes:
      k: positions to take.
      width: elements of a row of scores, a multiple of 16 bytes.
      itemsize: 4 (float32) or 2 (bfloat16).
      threads: of a block; a power of two from 128 to 1,024.
      vectors: neighbouring 16-byte pieces of a tile that a thread reads: 1, 2, 4 or 8.
      group: words of a thread whose maximum is one sample of the first threshold; 0: no first threshold.
      bins: of the histogram; a power of two, at least k.
      capacity: positions that the list holds, a multiple of the threads; at least k and a piece.
      buffers: tiles in shared memory, 1 or 2.
      splits: parts of a row, a multiple of `cluster`.
      part: elements of a part, a multiple of 16 bytes.
      cluster: neighbouring parts whose lists become one: 1, 2, 4 or 8.
      slots: results of a cluster. More than k: a list that is that short is written as it is.
      values: the results' scores are written too.
      mapped: the results are looked up in a row of ids.
    """

    k: int
    width: int
    itemsize: int
    threads: int
    vectors: int
    group: int
    bins: int
    capacity: int
    buffers: int
    splits: int
    part: int
    cluster: int
    slots: int
    values: bool
    mapped: bool

    @property
    def per_vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.itemsize

    @property
    def tile(self) -> int:
        """Elements that are looked at together."""
        return self.threads * self.vectors * self.per_vector

    @property
    def piece(self) -> int:
        """Elements of a tile that are appended at once when it does not fit as a whole: 4 of each thread."""
        return 4 * self.threads

    @property
    def one_tile(self) -> bool:
        return self.part <= self.tile

    @property
    def id_bytes(self) -> int:
        """Of a listed position, which counts from the part's start."""
        return 2 if self.part <= 1 << 16 and self.cluster == 1 else 4

    @property
    def share(self) -> int:
        """Positions that a part may bring to its cluster; at least k."""
        return self.capacity // self.cluster

    @property
    def shared_words(self) -> int:
        tiles = self.buffers * self.tile * self.itemsize // 4
        return tiles + self.bins + self.capacity + self.capacity * self.id_bytes // 4 + STATE_WORDS


# Words of shared memory behind the lists
(COUNT, TAKEN, TIES, HOLES, MOVERS, LOW, HIGH, BITS, BIN, ABOVE, INSIDE) = range(11)
COPIES = 12  # two barriers of 8 bytes
WARP_SUMS = 16
STATE_WORDS = 48
