"""Every TPU kernel lowers at released shapes, also where there is no TPU compiler: that much Mosaic runs anywhere."""

import jax
import pytest

from pallas_kernels.compat import lowering_for
from pallas_kernels.registry import OPS, arg_specs

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="lowers for a TPU from a process without an accelerator"
)

# Shapes that differ from another one of their op in a number only.
_SLOW = {
    "indexer-maxima_64x128k", "indexer-maxima_verify_8x128k", "indexer-maxima_prefill_16k",
    "indexer-maxima_prefill_64k", "indexer-entries_64x2048", "indexer-entries_64x512",
    "topk-decode_pool_entries_b64", "topk-prefill_entries", "sparse_attention-verify6_b64", "hyper_connection-t64",
    "experts-decode_e6", "fp8_linear-wo_b_t8", "fp8_linear-shared_t8", "fp8_linear-engram_t8",
    "fp8_linear-drafter_t64", "fp8_linear-wq_b_t64", "fp8_linear-wo_b_t512", "fp8_linear-wkv_t4096",
    "fp8_linear-shared_t4096",
}  # fmt: skip
CASES = [
    pytest.param(spec, id=name, marks=pytest.mark.slow if name in _SLOW else ())
    for op in OPS
    for spec in arg_specs(op, "aot")
    for name in [f"{op}-{spec.name}"]
]


@pytest.mark.parametrize("spec", CASES)
def test_tpu_kernels_lower(spec):
    arrays = spec.abstract()
    with lowering_for("tpu", "TPU v6 lite"):
        lowered = jax.jit(spec.bind("tpu")).trace(arrays).lower(lowering_platforms=("tpu",))
    assert "stablehlo.custom_call @tpu_custom_call" in lowered.as_text()
