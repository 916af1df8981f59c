"""Makes a tokenizer from the Python standard library of the running interpreter.

    python -m launch.make_tokenizer --out=tokenizer.json
    python -m launch.make_tokenizer --out=DIR/tokenizer.json --config=configs/nano.json --out_config=DIR/config.json

A byte-level BPE is learned from the training part of the corpus. The same interpreter gives the same file. With
--config the vocabulary has the size that the config says, and --out_config gets the config with the ids of the special
tokens and the number of Engram classes of this tokenizer. Prints one JSON object: what the corpus and the tokenizer
are.
"""

import json
import sys

from absl import flags

from dsv41.config import DSV41Error, config_to_dict, load_config
from dsv41.config.atomic_file import check_target, write_file, write_json
from dsv41.train.corpus import standard_library
from dsv41.train.tokenizer import VOCAB_SIZE, make_tokenizer, tokenizer_hash, tokenizer_json, with_tokenizer
from launch.cli import new_flags, run

FLAGS = new_flags()
_OUT = flags.DEFINE_string("out", None, "The tokenizer.json to write.", flag_values=FLAGS)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", None, f"Tokens, special ones included: {VOCAB_SIZE}, or as --config says.", flag_values=FLAGS
)
_CONFIG = flags.DEFINE_string("config", None, "A config.json, or a directory that holds one.", flag_values=FLAGS)
_OUT_CONFIG = flags.DEFINE_string("out_config", None, "With --config: the config.json to write.", flag_values=FLAGS)


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out is required")
    if _OUT_CONFIG.value is not None and _CONFIG.value is None:
        raise DSV41Error("--out_config needs --config")
    if _CONFIG.value is not None and _VOCAB_SIZE.value is not None:
        raise DSV41Error("--vocab_size and --config exclude each other: the config says how large the vocabulary is")
    for path in (_OUT.value, _OUT_CONFIG.value):
        if path is not None:
            check_target(path)
    config = None if _CONFIG.value is None else load_config(_CONFIG.value)
    vocab_size = (_VOCAB_SIZE.value or VOCAB_SIZE) if config is None else config.text_config.vocab_size
    corpus = standard_library()
    tokenizer = make_tokenizer((document.text for document in corpus.train), vocab_size)
    fitted = None if config is None else with_tokenizer(config, tokenizer)
    write_file(_OUT.value, tokenizer_json(tokenizer))
    if _OUT_CONFIG.value is not None:
        write_json(_OUT_CONFIG.value, config_to_dict(fitted))
    report = {"corpus": corpus.describe(), "vocab_size": vocab_size, "sha256": tokenizer_hash(tokenizer)}
    if fitted is not None and fitted.text_config.engram_layer_ids:
        report["engram_classes"] = fitted.text_config.engram_compressed_vocab_size
    print(json.dumps(report, indent=1))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
