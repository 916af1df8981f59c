"""The flags that say how tokens are drawn and what ends a text."""

from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.ops.sampling import SamplingParams


class SamplingFlags:
    """--temperature, --top_p, --top_k and --seed of a script."""

    def __init__(self, values: flags.FlagValues, seed: str = "Same seed, same draws.", *, temperature: float = 0.0):
        """Defines the flags in `values`; `seed` is the help of --seed, `temperature` the default of --temperature."""
        self._values = values
        flags.DEFINE_float(
            "temperature", temperature, "Divides the logits; 0 always takes the best token.", flag_values=values
        )
        flags.DEFINE_float(
            "top_p",
            SamplingParams.top_p,
            "Draw from the best tokens that hold this share of the mass.",
            flag_values=values,
        )
        flags.DEFINE_integer("top_k", 0, "Draw from that many best tokens; 0: from all.", flag_values=values)
        flags.DEFINE_integer("seed", 0, seed, flag_values=values)

    def read(self) -> SamplingParams:
        """The parameters.

        Raises:
          DSV41Error: one of them is out of range.
        """
        v = self._values
        return SamplingParams(temperature=v.temperature, top_p=v.top_p, top_k=v.top_k, seed=v.seed)


class StopFlags:
    """--stop_ids of a script."""

    def __init__(self, values: flags.FlagValues):
        """Defines the flag in `values`."""
        self._values = values
        flags.DEFINE_list(
            "stop_ids",
            None,
            "Token ids that end the text; empty: none. Default: the config's eos_token_id.",
            flag_values=values,
        )

    def read(self, config: ModelConfig) -> list[int]:
        """The ids.

        Raises:
          DSV41Error: not a list of numbers, or not ids of the model.
        """
        if self._values.stop_ids is None:
            return [config.eos_token_id]
        stop, size = parse_ids("stop_ids", self._values.stop_ids), config.text_config.vocab_size
        for token in stop:
            if not 0 <= token < size:
                raise DSV41Error(f"--stop_ids: expected ids in [0, {size}), got {token}")
        return stop


def parse_ids(flag: str, items: list[str]) -> list[int]:
    """The numbers of a flag that is a list of token ids."""
    try:
        return [int(item) for item in items]
    except ValueError as e:
        raise DSV41Error(f"--{flag}: expected ids as 0,17,42, got {','.join(items)!r}") from e
