"""What a block of the block-maxima kernel does: an equal share of all pages that any query sees.

Pages of a sequence are scored for a tile of its queries at a time. (Sequence, query tile) pairs are the rows of the
work, their visible pages its columns; a block takes a contiguous run of them, so that blocks finish together whatever
the lengths are. Inside a block every warpgroup takes every W-th page of the run, through its own ring of pages in
shared memory, and scores it for all queries of the tile. What no query sees is filled with -inf at the end.
"""

from typing import Any

from pallas_kernels.indexer import gpu_scores
from pallas_kernels.indexer.gpu_program import Program
from pallas_kernels.indexer.gpu_scores import GROUP, Lane, Queries
from pallas_kernels.indexer.plans import CODE_BYTES, PARAMETER_BYTES, MaximaPlan
from pallas_kernels.page_layout import PAGE_ENTRIES
from pallas_kernels.simt import Word

_NEGATIVE_INFINITY = 0xFF800000


class BlockMaxima:
    """The program; `run` is called once.

    queries: in global memory; pool u8 [P, page bytes], pages int32 [B, M], out f32 [B * T, M * 128 / block_size].
    """

    def __init__(self, s: Program, plan: MaximaPlan, queries: Queries, pool: Any, pages: Any, out: Any, shared: Any):
        self.s, self.plan, self.queries, self.pool, self.pages, self.out = s, plan, queries, pool, pages, out
        self.codes = s.shared(shared)  # at a 1,024-byte boundary
        self.parameters = self.codes + plan.parameter_offset
        self.ones = self.codes + plan.ones_offset
        self.starts = self.codes + plan.starts_offset
        self.thread, self.block = s.thread(), s.block()
        self.warpgroup = self.thread >> 7
        self.lane = Lane(s)
        self.ring = self.codes + plan.ring_offset + self.warpgroup * plan.ring_bytes

    def run(self) -> None:
        s = self.s
        gpu_scores.write_ones(s, self.thread, self.ones)
        s.shared_to_async()
        with s.when(self.thread < 32):
            self._count_pages()
        s.barrier()
        first, last, start, stop = self._share()

        def row(r):
            begin = s.load_shared(self.starts + (r << 2))
            end = s.load_shared(self.starts + (r << 2), 4)
            low, high = s.max(start, begin) - begin, s.min(stop, end) - begin
            self._row(r, low, high)
            return ()

        s.for_range(first, last, 1, (), row)
        self._fill()

    # Work

    def _count_pages(self) -> None:
        """A warp writes the running sum of the rows' visible pages to `starts`."""
        s, plan = self.s, self.plan
        lane = self.thread

        def chunk(first, total):
            r = first + lane
            known = r < plan.rows
            sequence = s.select(known, r // plan.tiles, 0)
            token = (s.select(known, r, 0) - sequence * plan.tiles) * plan.queries
            base = s.row(self.queries.visible, sequence, 4 * plan.tokens)
            visible = s.const(0)
            for i in range(plan.queries):
                visible = s.max(visible, s.load(base, s.min(token + i, plan.tokens - 1) << 2))
            count = s.min((visible + (PAGE_ENTRIES - 1)) >> 7, plan.table)
            running = s.running_sum(s.select(known, count, 0))
            with s.when(known):
                s.store_shared(self.starts + (r << 2), total + running, 4)
            return (total + s.from_lane(running, 31),)

        s.for_range(0, plan.rows, 32, (s.const(0),), chunk)
        with s.when(lane == 0):
            s.store_shared(self.starts, 0)

    def _share(self) -> tuple[Word, Word, Word, Word]:
        """Rows [first, last) and pages [start, stop), counted over all rows, of this block."""
        s, plan = self.s, self.plan
        total = s.load_shared(self.starts, 4 * plan.rows)
        each = total // plan.blocks
        rest = total - each * plan.blocks
        start = each * self.block + s.min(self.block, rest)
        stop = start + each + s.select(self.block < rest, 1, 0)
        lane = self.thread & 31

        def chunk(base, first, last):
            r = base + lane
            known = r < plan.rows
            at = self.starts + (s.select(known, r, 0) << 2)
            ended = known & (s.load_shared(at, 4) <= start)
            begun = known & (s.load_shared(at) < stop)
            return first + s.popcount(s.ballot(ended)), last + s.popcount(s.ballot(begun))

        first, last = s.for_range(0, plan.rows, 32, (s.const(0), s.const(0)), chunk)
        return first, last, start, stop

    def _row(self, r: Word, low: Word, high: Word) -> None:
        """Scores pages [low, high) of one sequence for one tile of queries."""
        s, plan = self.s, self.plan
        sequence = r // plan.tiles
        token = (r - sequence * plan.tiles) * plan.queries
        count = s.min(s.const(plan.tokens) - token, plan.queries)
        first_query = sequence * plan.tokens + token
        table = s.row(self.pages, sequence, 4 * plan.table)
        first = low + self.warpgroup

        def physical(page):
            return s.load(table, s.min(page, plan.table - 1) << 2)

        raw = gpu_scores.load_query(s, self.queries, first_query + s.min(self.warpgroup, count - 1))
        s.barrier()
        for i in range(plan.stages - 1):
            page = first + i * plan.warpgroups
            self._copy_page(physical(page), self.ring + i * plan.page_bytes, page < high)
        self._prepare(raw, first_query, count)
        s.barrier()
        ahead = (plan.stages - 1) * plan.warpgroups

        def step(page, slot, free, next_page):
            s.wait_copies(plan.stages - 2)
            s.warpgroup_barrier(self.warpgroup)
            self._copy_page(next_page, free, page + ahead < high)
            next_page = physical(page + (ahead + plan.warpgroups))
            self._score_page(page, physical(page), slot, first_query, count)
            following = slot + plan.page_bytes
            following = s.select(following == self.ring + plan.ring_bytes, self.ring, following)
            return following, slot, next_page

        free = self.ring + (plan.stages - 1) * plan.page_bytes
        s.for_range(first, high, plan.warpgroups, (self.ring, free, physical(first + ahead)), step)
        s.wait_copies(0)

    def _prepare(self, raw: gpu_scores.RawQuery, first_query: Word, count: Word) -> None:
        """The block writes the tile's queries to shared memory, each warpgroup `raw` first; a barrier must follow."""
        s, step = self.s, self.plan.warpgroups

        def write(raw, i):
            gpu_scores.write_query(s, raw, self.codes + i * CODE_BYTES, self.parameters + i * PARAMETER_BYTES)

        def following(i):
            write(gpu_scores.load_query(s, self.queries, first_query + i), i)
            return ()

        with s.when(self.warpgroup < count):
            write(raw, self.warpgroup)
        if self.plan.queries > step:
            s.for_range(self.warpgroup + step, count, step, (), following)
        s.shared_to_async()

    def _copy_page(self, physical: Word, slot: Word, wanted) -> None:
        """Starts copying a page (any page if it is unassigned) into a slot, 16-byte pieces swizzled by byte row."""
        s, plan = self.s, self.plan
        row, piece = self.lane.thread >> 3, self.lane.thread & 7
        physical = s.select(physical < 0x80000000, physical, 0)
        source = s.offset(s.row(self.pool, physical, plan.page_bytes), self.lane.thread << 4)
        target = slot + (row << 7) + ((piece ^ (row & 7)) << 4)
        rows = plan.layout.value_rows * 4 + plan.width // GROUP
        with s.when(wanted):
            for first in range(0, rows, 16):
                if first + 16 <= rows:
                    s.copy_16_bytes(target, source, first * 128)
                else:
                    with s.when(row < rows - first):
                        s.copy_16_bytes(target, source, first * 128)
        s.commit_copies()

    # Scores

    def _load_keys(self, slot: Word) -> list[list[Word]]:
        """For each group four words of keys, two for each tile of 64 entries.

        Entries of a thread: 32 warp + 16 tile + 2 row + {0, 1}, the second one in row + 8 of the tile.
        """
        s, lane = self.s, self.lane
        matrix_row, octet, tile = lane.lane & 7, (lane.lane >> 3) & 1, lane.lane >> 4
        piece = ((lane.warp << 1) + tile) ^ matrix_row
        address = slot + (((octet << 3) + matrix_row) << 7) + (piece << 4)
        return [s.load_matrices_transposed(address, g * 2048) for g in range(self.plan.width // GROUP)]

    def _operand(self, loaded: list[list[Word]], tile: int) -> list[list[Word]]:
        """For each group the four registers of a tile."""
        s, operand = self.s, []
        for words in loaded:
            pair = words[2 * tile : 2 * tile + 2]
            low_even, high_even = gpu_scores.expand(s, s.permute(*pair, 0x6420))
            low_odd, high_odd = gpu_scores.expand(s, s.permute(*pair, 0x7531))
            operand.append([low_even, low_odd, high_even, high_odd])
        return operand

    def _scales(self, slot: Word) -> gpu_scores.KeyScales:
        """Of the thread's four entries, which are those of the first tile, then of the second one."""
        s, lane, groups = self.s, self.lane, self.plan.width // GROUP
        # Matrix 2 tile + pair has the scales of groups 2 pair and 2 pair + 1 in turn as its rows.
        pair, tile, odd = (lane.lane >> 3) & 1, lane.lane >> 4, lane.lane & 1
        row = (pair << 1) + odd + self.plan.layout.value_rows * 4
        piece = ((lane.warp << 1) + tile) ^ (row & 7)
        loaded = s.load_matrices_transposed(slot + (row << 7) + (piece << 4), 0)
        pairs = (groups + 1) // 2
        words = [loaded[2 * tile + pair] for tile in range(2) for pair in range(pairs)]
        if groups == 1:
            words = [(x & 0xFFFF) | 0x7F7F0000 for x in words]
        entries = [
            [(pairs * tile + g // 2, 2 * (g % 2) + half) for g in range(groups)]
            for tile in range(2)
            for half in range(2)
        ]
        return gpu_scores.key_scales(s, words, entries)

    def _positions(self, page: Word, physical: Word, scales: gpu_scores.KeyScales) -> list[Word]:
        """Entry numbers of the thread's four entries, beyond any sequence for those that may not be seen."""
        s, lane = self.s, self.lane
        assigned = physical < 0x80000000
        first = (page << 7) + (lane.warp << 5) + (lane.row << 1)
        pairs = len(scales.nan) // 2
        positions = []
        for i in range(4):
            words = scales.nan[i // 2 * pairs :][:pairs]
            nan = words[0] if pairs == 1 else words[0] | words[1]
            usable = assigned & ((nan & (0x00800080 << 8 * (i % 2))) == 0)
            positions.append(s.select(usable, first + (16 * (i // 2) + i % 2), 0x7FFFFFFF))
        return positions

    def _score_page(self, page: Word, physical: Word, slot: Word, first_query: Word, count: Word) -> None:
        """Block maxima of a page for all queries of the tile: alone, or two at a time as columns of one product."""
        s, lane = self.s, self.lane
        keys = self._load_keys(slot)
        tiles, scales = [self._operand(keys, tile) for tile in range(2)], self._scales(slot)
        positions = self._positions(page, physical, scales)

        def store(query, kept):
            self._store_maxima(page, first_query, query, count, kept, scales.last, positions)

        if self.plan.queries > 1:
            self._score_queries(tiles, scales, store, count)
            return
        terms = [
            gpu_scores.tile_terms(s, lane, tiles[u], scales, (2 * u, 2 * u + 1), self.codes, self.parameters)
            for u in range(2)
        ]
        store(s.const(0), [x for sums in s.row_sums(terms, self.ones) for x in sums])

    def _score_queries(self, tiles, scales: gpu_scores.KeyScales, store, count: Word) -> None:
        """All lanes of a quad get the scores of every query. Each of them keeps those of one in `plan.together`, so
        that masking, the maxima and storing are done once for them.
        """
        s, together = self.s, self.plan.together
        own = self.lane.quad & (together - 1)

        def pair(i, *kept):
            products = _Products(s, tiles, self.codes + i * CODE_BYTES)
            # If there is no second query, its scores mean nothing and are not stored.
            parameters = [self.parameters + x * PARAMETER_BYTES for x in (i, s.min(i + 1, count - 1))]
            for j, scores in enumerate(self._scores(products, scales, parameters)):
                mine = own == ((i + j) & (together - 1))
                kept = [s.select(mine, a, b) for a, b in zip(scores, kept, strict=True)]
            last = i + 2 >= count
            with s.when(((i & (together - 1)) == together - 2) | last):
                store(i - (i & (together - 1)) + own, kept)
            return kept

        s.for_range(0, count, 2, [s.const(0)] * 4, pair)

    def _scores(self, products: "_Products", scales: gpu_scores.KeyScales, parameters: list[Word]) -> list[list[Word]]:
        """Of each query and the thread's four entries, without the factor `scales.last`."""
        s, lane = self.s, self.lane
        slow = [gpu_scores.is_slow(s, x, scales) for x in parameters]
        terms: list[list[list[Word]]] = [[] for _ in parameters]
        totals: list = [None] * len(parameters)
        for tile, first, last in products.steps:
            dots = products.wait()
            for j, address in enumerate(parameters):
                mine = [x[16 * j : 16 * j + 16] for x in dots]
                entries = (2 * tile, 2 * tile + 1)
                totals[j] = gpu_scores.add_groups(s, lane, totals[j], mine, first, scales, entries, address, slow[j])
            products.start()
            if last:
                for j, address in enumerate(parameters):
                    terms[j].append(gpu_scores.head_terms(s, lane, totals[j], address))
                    totals[j] = None
        sums = s.row_sums([x for query in terms for x in query], self.ones)
        return [[x for pair in sums[2 * j : 2 * j + 2] for x in pair] for j in range(len(parameters))]

    def _store_maxima(self, page, first_query, query, count, sums, last, positions) -> None:
        """Writes the maxima of the warp's 32 entries for the query of each lane."""
        s, plan, lane = self.s, self.plan, self.lane
        visible = gpu_scores.load_visible(s, self.parameters + s.min(query, count - 1) * PARAMETER_BYTES)
        values = [s.times(x, factor) for x, factor in zip(sums, last, strict=True)]
        best = [gpu_scores.masked_max(s, values[i : i + 2], positions[i : i + 2], visible) for i in (0, 2)]
        pair = s.pack_bf16(*best)
        for mask in (4, 8, 16)[: plan.block_size.bit_length() - 2]:
            pair = s.pair_max(pair, s.exchange(pair, mask))
        writes = (lane.quad < plan.together) & ((lane.row & (plan.block_size // 2 - 1)) == 0)
        in_page = (lane.warp << 5) + (lane.row << 1)
        offset = (page * plan.page_maxima + in_page // plan.block_size) << 2
        with s.when(writes & (query < count)):
            out = s.row(self.out, first_query + query, plan.table * plan.page_maxima * 4)
            s.store(out, offset, s.positive_zero(pair << 16))
            s.store(out, offset + 64 // plan.block_size, s.positive_zero(pair & 0xFFFF0000))

    def _fill(self) -> None:
        """-inf for the pages of each query that its row does not score; queries, or parts of them, dealt to blocks."""
        s, plan = self.s, self.plan
        num_queries = plan.batch * plan.tokens
        parts = -(-plan.blocks // num_queries)
        width = plan.table * plan.page_maxima
        vectors = width // 4
        negative = [s.const(_NEGATIVE_INFINITY)] * 4

        def item(i):
            query = i // parts
            part = i - query * parts
            sequence = query // plan.tokens
            at = sequence * plan.tiles + (query - sequence * plan.tokens) // plan.queries
            at = self.starts + (at << 2)
            scored = s.load_shared(at, 4) - s.load_shared(at)
            first = scored * (plan.page_maxima // 4)
            each = (s.const(vectors) - first + (parts - 1)) // parts
            low = first + part * each
            out = s.row(self.out, query, 4 * width)

            def store(j):
                s.store_words(out, j << 4, negative)
                return ()

            s.for_range(low + self.thread, s.min(low + each, vectors), plan.warpgroups * 128, (), store)
            return ()

        s.for_range(self.block, num_queries * parts, plan.blocks, (), item)


class _Products:
    """Products of a page's two tiles with two queries, in halves of the groups, started two halves ahead.

    The tiles' registers must live until all products have been waited for.
    """

    def __init__(self, s: Program, tiles: list[list[list[Word]]], codes: Word):
        self.s, self.tiles, self.codes = s, tiles, codes
        groups = len(tiles[0])
        self.half = max(groups // 2, 1)
        # Tile, first group, whether these are the tile's last groups.
        self.steps = [(t, g, g + self.half == groups) for t in range(2) for g in range(0, groups, self.half)]
        self.started: list[list[list[Word]]] = []
        self.waited = 0
        for _ in range(2):
            self.start()

    def start(self) -> None:
        if len(self.started) < len(self.steps):
            tile, first, _ = self.steps[len(self.started)]
            operand = self.tiles[tile][first : first + self.half]
            self.started.append(self.s.start_dots(operand, self.codes, first=first, columns=64))

    def wait(self) -> list[list[Word]]:
        """Dots of the next step."""
        self.waited += 1
        return self.s.wait_dots(self.started[self.waited - 1], len(self.started) - self.waited)
