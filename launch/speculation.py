"""The flags of speculative decoding, and what they say."""

from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import Speculation, VerifySchedule, load_temperatures, load_throughput_table
from dsv41.ops.verification import AcceptanceRule

_ONLY_ON = ("draft_tokens", "acceptance", "verify", "throughput_table", "confidence_temperatures")


class SpeculationFlags:
    """--speculate and the flags that say how."""

    def __init__(self, values: flags.FlagValues):
        """Defines the flags in `values`."""
        self._values = values
        flags.DEFINE_enum(
            "speculate",
            "off",
            ["on", "off"],
            "on: the drafter proposes tokens and the model verifies them, several a step. Same tokens at temperature "
            "0 (on CPU; elsewhere but for near-ties), tokens of the same law above.",
            flag_values=values,
        )
        flags.DEFINE_integer(
            "draft_tokens",
            None,
            "Drafts that a step may verify, 0 to the config's dspark_block_size; all by default.",
            flag_values=values,
        )
        flags.DEFINE_enum(
            "acceptance",
            Speculation.rule.value,
            [r.value for r in AcceptanceRule],
            "token: accept draft by draft; block: as a block, which keeps as many or more on average.",
            flag_values=values,
        )
        flags.DEFINE_enum(
            "verify",
            Speculation.schedule.value,
            [s.value for s in VerifySchedule],
            "Which drafts a step verifies. all: every one; budget: as many as older confidences say pay off, in "
            "narrower steps; greedy: as current ones say, the exact Algorithm 1, in steps as wide as all's. Both need "
            "--throughput_table.",
            flag_values=values,
        )
        flags.DEFINE_string(
            "throughput_table", None, "File made by launch.profile_speculation on this machine.", flag_values=values
        )
        flags.DEFINE_string(
            "confidence_temperatures", None, "File made by launch.calibrate_confidence.", flag_values=values
        )

    def read(self, config: ModelConfig) -> Speculation | None:
        """How to speculate, None if not at all; reads the files that the flags name.

        Raises:
          DSV41Error: the flags or the files do not fit the config or each other.
        """
        v = self._values
        if v.speculate == "off":
            for name in _ONLY_ON:
                if v[name].present:
                    raise DSV41Error(f"--{name}: only with --speculate=on")
            return None
        if v.draft_tokens == 0:
            return None
        if v.verify == VerifySchedule.ALL.value:
            for name in ("throughput_table", "confidence_temperatures"):
                if v[name].present:
                    raise DSV41Error(f"--{name}: only with --verify=budget or --verify=greedy")
        block = config.text_config.dspark_block_size
        table, temperatures = v.throughput_table, v.confidence_temperatures
        speculation = Speculation(
            draft_tokens=v.draft_tokens,
            rule=AcceptanceRule(v.acceptance),
            schedule=VerifySchedule(v.verify),
            throughput=None if table is None else load_throughput_table(table, block),
            temperatures=None if temperatures is None else load_temperatures(temperatures, block),
        )
        speculation.drafts(config)  # refuses what the config rules out, before a long load
        return speculation
