"""torch.topk on the same shape."""

import statistics


def torch_topk_us(rows: int, width: int, k: int, dtype: str, *, sets: int = 4, calls: int = 40) -> float:
    """Microseconds of one `torch.topk` without sorting its result, the median over replays of a CUDA graph.

    Args:
      rows, width: of the scores, which are normal.
      k: scores to take.
      dtype: "float32" or "bfloat16".
      sets: inputs that take turns, so that the cache does not hold the next one.
      calls: timed replays of all sets.
    """
    import torch

    scores = [torch.randn(rows, width, device="cuda").to(getattr(torch, dtype)) for _ in range(sets)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for x in scores:
            torch.topk(x, k, sorted=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in scores:
            torch.topk(x, k, sorted=False)
    times = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)
