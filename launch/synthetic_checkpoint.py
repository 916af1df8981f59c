"""Writes a small checkpoint with every tensor name of a config, to try tools on without the real files.

    python -m launch.synthetic_checkpoint --config=configs/flash.json --out=DIR
    python -m launch.synthetic_checkpoint --config=configs/flash.json --factor=40 --out=DIR

--out is a new directory; it will be in the released layout: config.json, tokenizer.json, an index and --shards
safetensors files. Layers, experts, drafter stages and vision blocks are as many as the config says, 96,085 tensors for
the released one. Widths are divided by --factor and rounded up to what the stored formats allow; vocabulary and Engram
tables are those of the bundled tiny model. The values are random.
"""

import sys

from absl import flags

from dsv41.checkpoint.synthetic import write_synthetic_checkpoint
from dsv41.config import DSV41Error, load_config
from launch.cli import new_flags, run
from launch.load_model import progress_bar

FLAGS = new_flags()
_CONFIG = flags.DEFINE_string("config", None, "A config.json, or a directory that holds one.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory to write; new or empty.", flag_values=FLAGS)
_FACTOR = flags.DEFINE_integer("factor", 160, "Widths are divided by it.", flag_values=FLAGS)
_SHARDS = flags.DEFINE_integer("shards", 8, "Safetensors files.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the random values.", flag_values=FLAGS)


def main() -> None:
    for name in ("config", "out"):
        if FLAGS[name].value is None:
            raise DSV41Error(f"--{name} is required")
    config = load_config(_CONFIG.value)
    with progress_bar(FLAGS.verbose, in_bytes=True) as bar:
        task = bar.add_task("writing", total=None)
        written = write_synthetic_checkpoint(
            _OUT.value,
            config,
            factor=_FACTOR.value,
            shards=_SHARDS.value,
            seed=_SEED.value,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
        )
    print(f"{_OUT.value}: {len(written):,} tensors, {sum(spec.nbytes for spec in written.values()):,} bytes")


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
