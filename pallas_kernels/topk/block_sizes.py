"""How the GPU kernel divides a top-k among blocks and threads."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.topk.gpu_plan import Plan
from pallas_kernels.tuning import knob

MAX_K = 2048
MAX_WIDTH = 1 << 24
MULTIPROCESSORS = 132
MAX_BLOCKS = (1 << 31) - 1
MAX_SPLITS = 128


def problem(rows: int, width: int, k: int) -> str | None:
    """Why there is no plan; None if there is."""
    if k > MAX_K:
        return f"k = {k} is more than {MAX_K}"
    if width > MAX_WIDTH:
        return f"rows of {width} scores are longer than {MAX_WIDTH}"
    if rows > MAX_BLOCKS // MAX_SPLITS:
        return f"{rows} rows are too many"
    return None


def knobs(
    scores: jax.ShapeDtypeStruct, k: int, lengths: jax.ShapeDtypeStruct | None = None
) -> tuple[str, dict[str, Sequence[int]]]:
    """What the tuner may vary for these arguments of `ops.topk`, see `pallas_kernels.tuning`."""
    del lengths
    rows, width = scores.shape
    choices: dict[str, Any] = {"threads": (128, 256, 512, 1024)}
    if width > 8192:
        splits = [1 << i for i in range(8) if width >> i >= 4096 and rows << i <= 16 * MULTIPROCESSORS]
        choices |= {"splits": splits or [1], "cluster": (1, 2, 4, 8)}
    return _key(rows, width, k, scores.dtype.itemsize), choices


def _key(rows: int, width: int, k: int, itemsize: int) -> str:
    return f"{rows}x{width} k{k} f{8 * itemsize}"


def plans(rows: int, width: int, k: int, itemsize: int) -> tuple[Plan, Plan | None]:
    """The launch over all scores, and one over what the clusters of a row kept, if a row has several.

    Args:
      rows, width: of the scores; width is a multiple of 16 bytes.
      k: positions to take.
      itemsize: 4 or 2.
    """
    key = _key(rows, width, k, itemsize)
    splits = knob("topk", key, "splits", _splits(rows, width, k))
    cluster = min(knob("topk", key, "cluster", _cluster(splits, k)), splits)
    vector = 16 // itemsize
    part = -(-width // (splits * vector)) * vector
    threads = knob("topk", key, "threads", _threads(rows * splits, part, itemsize))
    sizes = {"blocks": rows * splits, "threads": threads, "part": part, "splits": splits, "cluster": cluster}
    if splits == cluster:
        return plan(width, k, itemsize, **sizes), None
    slots = k + -k % 4 if cluster > 1 else 2 * k + -2 * k % 4
    first = plan(width, k, itemsize, **sizes, slots=slots, values=True)
    kept = splits // cluster * slots
    return first, plan(kept, k, 4, blocks=rows, threads=_threads(rows, kept, 4), mapped=True)


def _splits(rows: int, width: int, k: int) -> int:
    """Parts of a row, a power of two: at most one block a multiprocessor, each much longer than what it keeps."""
    splits = 1
    while 2 * splits * rows <= MULTIPROCESSORS and width // (2 * splits) >= max(16384, 16 * k):
        splits *= 2
    return splits


def _cluster(splits: int, k: int) -> int:
    """Parts that join their lists: all, if the first block's memory holds the lists and a cluster may be so large.

    Else there is a second launch in any case, and pairs keep the first one short.
    """
    return splits if splits <= (8 if k <= 1024 else 4) else 2


def _busy(blocks: int) -> bool:
    """Whether blocks queue for the device: then work counts, else the time of one block."""
    return blocks > 4 * MULTIPROCESSORS


def _threads(blocks: int, part: int, itemsize: int) -> int:
    per_vector = 16 // itemsize
    if _busy(blocks):
        return _clamp(part // (8 * per_vector), 128, 512)
    most = 1024 if part > 16384 and blocks <= MULTIPROCESSORS else 512
    return _clamp(part // (2 * per_vector), 128, most)


def _clamp(wanted: int, least: int, most: int) -> int:
    """The next power of two, within bounds that are such."""
    return min(max(1 << max(wanted - 1, 0).bit_length(), least), most)


def plan(width: int, k: int, itemsize: int, *, blocks: int, threads: int, part: int | None = None, **changes) -> Plan:
    """One launch; `changes` are attributes of the plan that this would decide otherwise, or does not decide."""
    cluster = changes.get("cluster", 1)
    per_vector = 16 // itemsize
    part = width if part is None else part
    vectors = 1
    # one tile if that can be, else two half as long, one of which is on its way
    while vectors < 8 and threads * vectors * per_vector < part:
        vectors *= 2
    if threads * vectors * per_vector < part and threads * vectors * 16 > 1 << 15:
        vectors //= 2
    tile, piece = threads * vectors * per_vector, threads * 4
    group = _group(vectors * 4, threads, k, per_vector // 4)
    capacity = max(tile if part <= tile and not group else 0, k + piece, 5 * k // 2)
    if part > tile:
        capacity = max(capacity, k + 2 * piece, 4 * k)
    if cluster > 1:
        capacity = max(capacity, cluster * k * 5 // 4)
    values = {
        "k": k,
        "width": width,
        "itemsize": itemsize,
        "threads": threads,
        "vectors": vectors,
        "group": group,
        "bins": max(512 if _busy(blocks) else 2048, 1 << (k - 1).bit_length()),
        "capacity": -(-capacity // threads) * threads,
        "buffers": 2 if part > tile else 1,
        "splits": 1,
        "cluster": 1,
        "part": part,
        "slots": k,
        "values": False,
        "mapped": False,
    }
    return Plan(**(values | changes))


def _group(words: int, threads: int, k: int, per_word: int) -> int:
    """Words under one maximum: 4 k maxima if that can be, not fewer than 2 k, and at least two scores each."""
    for least in (4 * k, 2 * k):
        group = words
        while group > 1 and words // group * threads * per_word < least:
            group //= 2
        if words // group * threads * per_word >= least and (group > 1 or per_word > 1):
            return group
    return 0
