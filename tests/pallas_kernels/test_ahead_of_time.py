"""Every TPU kernel lowers at released shapes, also where there is no TPU compiler: that much Mosaic runs anywhere."""

import jax
import pytest

from pallas_kernels.compat import lowering_for
from pallas_kernels.registry import OPS, arg_specs

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="lowers for a TPU from a process without an accelerator"
)

CASES = [pytest.param(spec, id=f"{op}-{spec.name}") for op in OPS for spec in arg_specs(op, "aot")]


@pytest.mark.parametrize("spec", CASES)
def test_tpu_kernels_lower(spec):
    arrays = spec.abstract()
    with lowering_for("tpu", "TPU v6 lite"):
        lowered = jax.jit(spec.bind("tpu")).trace(arrays).lower(lowering_platforms=("tpu",))
    assert "stablehlo.custom_call @tpu_custom_call" in lowered.as_text()
