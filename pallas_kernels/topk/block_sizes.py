"""How the GPU kernel divides a top-k among blocks and threads."""

from pallas_kernels.topk.gpu_plan import Plan

MAX_K = 2048
MAX_WIDTH = 1 << 24
MULTIPROCESSORS = 132
MAX_BLOCKS = (1 << 31) - 1


def problem(rows: int, width: int, k: int) -> str | None:
    """Why there is no plan; None if there is."""
    if k > MAX_K:
        return f"k = {k} is more than {MAX_K}"
    if width > MAX_WIDTH:
        return f"rows of {width} scores are longer than {MAX_WIDTH}"
    if rows > MAX_BLOCKS // (2 * MULTIPROCESSORS):
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
        return plan(width, k, itemsize), None
    vector = 16 // itemsize
    part = -(-width // (splits * vector)) * vector
    splits = -(-width // part)
    slots = 2 * k + -2 * k % 4
    first = plan(width, k, itemsize, part=part, splits=splits, slots=slots, values=True)
    return first, plan(splits * slots, k, 4, mapped=True)


def _splits(rows: int, width: int, k: int) -> int:
    """Parts of a row: enough to occupy the device, as long as each part is much longer than what it keeps."""
    if width <= 16384:
        return 1
    wanted = -(-2 * MULTIPROCESSORS // rows)
    return max(1, min(wanted, width // max(8192, 8 * k)))


def plan(width: int, k: int, itemsize: int, **changes) -> Plan:
    """One launch; `changes` are attributes of the plan that this does not decide."""
    per_vector = 16 // itemsize
    part = changes.setdefault("part", width)
    threads, vectors = 128, 1
    longest = 16384 if part <= 16384 else 8192 * 4 // itemsize
    while threads * vectors * per_vector < min(part, longest):
        if vectors < 8:
            vectors *= 2
        else:
            threads *= 2
    tile, piece = threads * vectors * per_vector, threads * 4
    group = _group(vectors * 4, threads, k, per_vector // 4)
    if group or part > tile:
        capacity = max(3 * k, k + 2 * piece)
    else:
        capacity = max(tile, k + piece)
    values = {
        "k": k,
        "width": width,
        "itemsize": itemsize,
        "threads": threads,
        "vectors": vectors,
        "group": group,
        "bins": max(512, 1 << (k - 1).bit_length()),
        "capacity": -(-capacity // threads) * threads,
        "buffers": 2 if part > tile else 1,
        "splits": 1,
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
