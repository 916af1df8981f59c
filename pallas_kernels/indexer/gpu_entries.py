"""What a block of the entry-scores kernel does: one query, its chosen blocks, 256 entries a warpgroup at a time.

The four lanes of a quad hold the same eight neighbouring entries of the output, each lane a quarter of their channels:
every load is 8 bytes of one byte row of a page (4 where blocks are that short). Eight entries are two words a byte row,
a word four entries, which are the rows of two tiles.
"""

import functools
import operator
from typing import Any

from pallas_kernels.indexer import gpu_scores
from pallas_kernels.indexer.gpu_program import Program
from pallas_kernels.indexer.gpu_scores import GROUP, Lane, Queries
from pallas_kernels.indexer.plans import CODE_BYTES, PARAMETER_BYTES, EntriesPlan
from pallas_kernels.page_layout import PAGE_ENTRIES
from pallas_kernels.simt import Flag, Word

_CHUNK = 256  # entries of a warpgroup's step
_NEVER = 0x7FFFFFFF


class EntryScores:
    """The program; `run` is called once.

    pool u8 [P, page bytes], pages int32 [B, M], blocks int32 [B * T, n], out f32 [B * T, n * block_size].
    """

    def __init__(
        self, s: Program, plan: EntriesPlan, queries: Queries, pool: Any, pages: Any, blocks: Any, out: Any, shared: Any
    ):
        self.s, self.plan, self.queries = s, plan, queries
        self.codes = s.shared(shared)  # at a 1,024-byte boundary
        self.parameters = self.codes + CODE_BYTES
        self.ones = self.parameters + PARAMETER_BYTES
        self.lane = Lane(s)
        self.warpgroup = s.thread() >> 7
        self.query = s.block() // plan.splits
        self.split = s.block() - self.query * plan.splits
        self.pool = pool
        self.table = s.row(pages, self.query // plan.tokens, 4 * plan.table)
        self.blocks = s.row(blocks, self.query, 4 * plan.count)
        self.out = s.row(out, self.query, 4 * plan.entries)

    def run(self) -> None:
        s, plan = self.s, self.plan
        gpu_scores.write_ones(s, s.thread(), self.ones)
        with s.when(self.warpgroup == 0):
            raw = gpu_scores.load_query(s, self.queries, self.query)
            gpu_scores.write_query(s, raw, self.codes, self.parameters)
        s.shared_to_async()
        s.barrier()
        first = (self.split * plan.warpgroups + self.warpgroup) * _CHUNK
        stride = plan.splits * plan.warpgroups * _CHUNK

        def step(start):
            self._chunk(start)
            return ()

        s.for_range(first, plan.entries, stride, (), step)

    def _chunk(self, start: Word) -> None:
        s, lane = self.s, self.lane
        first = start + (((lane.warp << 3) + lane.row) << 3)
        places = [self._place(first)]
        places.append(self._place(first + 4) if self.plan.block_size < 8 else (places[0][0], places[0][1] + 4))
        words, loaded = self._load(places)
        groups = range(len(words))
        # Words of four entries: first the groups of the lower half, then of the upper one.
        scales = gpu_scores.key_scales(
            s,
            [x[k] for k in range(2) for x in loaded],
            [[(k * len(words) + g, byte) for g in groups] for k in range(2) for byte in range(4)],
        )
        terms = []
        for k in range(2):
            operand = self._operand([[x[k] for x in rows] for rows in words])
            for tile in range(2):
                entries = (4 * k + 2 * tile, 4 * k + 2 * tile + 1)
                terms.append(
                    gpu_scores.tile_terms(s, lane, operand[tile], scales, entries, self.codes, self.parameters)
                )
        sums = s.row_sums(terms, self.ones)
        self._store(first, sums, scales, places)

    def _place(self, output: Word) -> tuple[Any, Word]:
        """Where the entry of an output is: the page's address plus its offset there, and its number or `_NEVER`."""
        s, plan = self.s, self.plan
        index = output // plan.block_size
        known = index < plan.count
        block = s.load(self.blocks, s.select(known, index, 0) << 2)
        known = known & (block < _NEVER // plan.block_size)
        entry = s.select(known, block * plan.block_size + (output & (plan.block_size - 1)), 0)
        known = known & ((entry >> 7) < plan.table)
        page = s.load(self.table, s.select(known, entry >> 7, 0) << 2)
        known = known & (page < 0x80000000)
        row = s.row(self.pool, s.select(known, page, 0), plan.page_bytes)
        return s.offset(row, entry & (PAGE_ENTRIES - 1)), s.select(known, entry, _NEVER - 8)

    def _load(self, places: list[tuple[Any, Word]]) -> tuple[list[list[list[Word]]], list[list[Word]]]:
        """For each group its four byte rows and its scales, both as words of four entries."""
        s, plan, lane = self.s, self.plan, self.lane

        def load(addresses, displacement):
            if plan.block_size >= 8:
                return s.load_words(addresses[0], 2, displacement)
            return [s.load_words(x, 1, displacement)[0] for x in addresses]

        pages = [address for address, _ in places]
        mine = [s.offset(address, lane.quad << 8) for address in pages]
        groups = range(plan.width // GROUP)
        rows = [[load(mine, 2048 * g + d) for d in (0, 128, 1024, 1152)] for g in groups]
        first = plan.layout.value_rows * 4
        return rows, [load(pages, (first + g) * PAGE_ENTRIES) for g in groups]

    def _operand(self, words: list[list[Word]]) -> list[list[list[Word]]]:
        """For two tiles and each group the registers of the keys; words: for each group four byte rows."""
        s = self.s
        tiles = [[], []]
        for x in words:
            for tile, selector in enumerate((0x5140, 0x7362)):
                pairs = s.permute(x[0], x[1], selector), s.permute(x[2], x[3], selector)
                (low_a, high_a), (low_b, high_b) = (
                    gpu_scores.expand(s, s.permute(*pairs, selector)) for selector in (0x5410, 0x7632)
                )
                tiles[tile].append([low_a, low_b, high_a, high_b])
        return tiles

    def _store(self, first: Word, sums: list[list[Word]], scales: gpu_scores.KeyScales, places) -> None:
        """A lane stores the two scores of the tile that has its quad's number."""
        s, lane = self.s, self.lane

        def mine(choices):
            kept = choices[0]
            for tile in range(1, 4):
                kept = s.select(lane.quad == tile, choices[tile], kept)
            return kept

        second: Flag = lane.quad >= 2
        entry = s.select(second, places[1][1], places[0][1]) + ((lane.quad & 1) << 1)
        half = len(scales.nan) // 2
        nan = [functools.reduce(operator.or_, scales.nan[k * half :][:half]) for k in range(2)]
        bits = s.select(second, nan[1], nan[0]) >> ((lane.quad & 1) << 4)
        visible = gpu_scores.load_visible(s, self.parameters)
        scores = []
        for i in range(2):
            value = s.times(mine([x[i] for x in sums]), mine([scales.last[2 * tile + i] for tile in range(4)]))
            position = s.select((bits >> (8 * i + 7) & 1) == 0, entry + i, _NEVER)
            scores.append(gpu_scores.masked_max(s, [value], [position], visible))
        pair = s.pack_bf16(*scores)
        out = [s.positive_zero(pair << 16), s.positive_zero(pair & 0xFFFF0000)]
        column = first + (lane.quad << 1)
        with s.when(column < self.plan.entries):
            s.store_words(self.out, column << 2, out)
