"""Other libraries on the same work, for the benchmark only; the library never imports this."""

from pallas_kernels.arg_spec import ArgSpec


def peer_times(op: str, spec: ArgSpec) -> dict[str, float]:
    """Microseconds of the peers that can do a spec's work, by name; empty if there are none.

    Raises:
      ImportError: torch is not installed.
    """
    if op != "topk":
        return {}
    from pallas_kernels.bench_peers.torch_topk import torch_topk_us

    scores = spec.abstract()["scores"]
    return {"torch.topk": torch_topk_us(*scores.shape, min(spec.static["k"], scores.shape[1]), scores.dtype.name)}
