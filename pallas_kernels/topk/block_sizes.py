"""How the GPU kernel divides a top-k among blocks and threads."""

from pallas_kernels.topk.gpu_program import Plan

MAX_K = 2048  # positions of the list that can move at once, see TopK._cut
MAX_WIDTH = 1 << 24
MULTIPROCESSORS = 132
MAX_BLOCKS = (1 << 31) - 1


def problem(rows: int, width: int, k: int, itemsize: int) -> str | None:
    """Why there is no plan; None if there is."""
    del itemsize
    if k > MAX_K:
        return f"k = {k} is more than {MAX_K}"
    if width > MAX_WIDTH:
        return f"rows of {width} scores are longer than {MAX_WIDTH}"
    if rows * -(-width // 1024) > MAX_BLOCKS:
        return f"{rows} rows are too many"
    return None


def plans(rows: int, width: int, k: int, itemsize: int) -> tuple[Plan, Plan | None]:
    """The launch over all scores, and one over what the parts of rows kept, if rows are divided.

    Args:
      rows, width: of the scores; width is a multiple of 16 bytes.
      k: positions to take.
      itemsize: 4 or 2.
    """
    splits = _splits(rows, width, k)
    if splits == 1:
        return _plan(width, k, itemsize, part=width), None
    vector = 16 // itemsize
    part = -(-width // (splits * vector)) * vector
    splits = -(-width // part)
    slots = 2 * k + -2 * k % 4
    first = _plan(width, k, itemsize, part=part, splits=splits, slots=slots, values=True)
    return first, _plan(splits * slots, k, 4, part=splits * slots, mapped=True)


def _splits(rows: int, width: int, k: int) -> int:
    """Parts of a row: enough to occupy the device, as long as each part is much longer than what it keeps."""
    wanted = -(-2 * MULTIPROCESSORS // rows)
    return max(1, min(wanted, width // max(8192, 8 * k)))


def _plan(width, k, itemsize, *, part, splits=1, slots=None, values=False, mapped=False) -> Plan:
    vector = 16 // itemsize
    threads, vectors = 128, 1
    while threads * vectors * vector < part and threads * vectors * vector < 16384:
        if threads * vectors * vector < 1024 or (vectors * vector >= 16 and threads < 512):
            if vectors * vector < 16:
                vectors *= 2
            else:
                threads *= 2
        elif vectors * vector < 32 and (threads == 512 or vectors * vector < 16):
            vectors *= 2
        else:
            break
    tile = threads * vectors * vector
    piece = threads * vector
    # maxima of `group` words each: at least 2 k of them, each over at least two scores
    words = threads * vectors * 4
    per_word = vector // 4
    group = 4 * vectors
    while group > 1 and words // group * per_word < 4 * k:
        group //= 2
    if (group == 1 and per_word == 1) or words // group * per_word < 2 * k:
        group = 0
    capacity = max(k + 2 * piece, 4 * k, 4096) if group or part > tile else max(tile, k + piece)
    return Plan(
        k=k,
        width=width,
        itemsize=itemsize,
        threads=threads,
        vectors=vectors,
        group=group,
        capacity=capacity,
        splits=splits,
        part=part,
        slots=k if slots is None else slots,
        values=values,
        mapped=mapped,
    )
