"""Scores given tokens: logits or log-probabilities into a file, and the perplexity.

    python -m launch.score --checkpoint=DIR --tokens=FILE.safetensors --out=FILE.safetensors
    python -m launch.score --tokens=FILE.safetensors --out=FILE.safetensors --logprobs_only --decode_from=40 --json
    python -m launch.score --tokens=ROW.safetensors --image=A.png --image=B.jpg --out=FILE.safetensors

--tokens holds `tokens`, int32 or int64 [B, T], no padding. --out will hold float32 `logits` [B, T, V], or with
--logprobs_only float32 `logprobs` [B, T-1]: the log-probability of token t + 1 given tokens 0 to t. It is written
beside its final place and put there when it is complete. The perplexity is exp of the mean of minus those
log-probabilities.

With --image, the tokens are one row in which every image has its whole span of image tokens already, in the order of
the flags: start, rows of patches each with a newline, end; a span of another length than the image's grid needs is
refused. Image tokens without --image are refused too.

--mesh spreads the model over devices, of several processes if they are started so (docs/pods.md). Process 0 writes the
file and prints.

How the tokens are cut into steps (--chunk, --decode_from) changes speed and memory, not what is computed. With --json,
stdout is exactly one JSON object with perplexity and mean_logprob (null if T is 1), predictions, out, array, shape and
timings; score_s contains compiling.
"""

import contextlib
import json
import math
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.evals import CHUNK, ArrayFileWriter, check_target, check_tokens, read_tokens, score_tokens
from dsv41.images import PreparedImage
from dsv41.models import Model, check_images
from dsv41.sharding.agreement import check_same_input
from dsv41.sharding.processes import is_first_process
from launch.cli import new_flags, run
from launch.images import ImageFlags, image_bytes
from launch.load_model import ModelFlags, progress_bar
from launch.mesh_flags import MeshFlags

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_TOKENS = flags.DEFINE_string("tokens", None, "Safetensors file with `tokens` [B, T].", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Safetensors file to write; replaced if it exists.", flag_values=FLAGS)
_CHUNK = flags.DEFINE_integer(
    "chunk", CHUNK, "Forward in chunks of that many tokens; memory grows with it.", flag_values=FLAGS
)
_DECODE_FROM = flags.DEFINE_integer(
    "decode_from", None, "Forward the tokens from this position on one at a time.", flag_values=FLAGS
)
_LOGPROBS_ONLY = flags.DEFINE_bool(
    "logprobs_only", False, "Write log-probabilities of the tokens instead of logits.", flag_values=FLAGS
)
_IMAGES = ImageFlags(FLAGS, "Its span of image tokens lies in the one row of --tokens.")
_MESH = MeshFlags(FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)


def _score_to_file(
    model: Model, tokens: np.ndarray, images: list[list[PreparedImage]]
) -> tuple[str, tuple[int, ...], float | None]:
    """Writes the file; returns the array's name and shape and the mean log-probability."""
    rows, length = tokens.shape
    if _LOGPROBS_ONLY.value:
        name, shape = "logprobs", (rows, length - 1)
    else:
        name, shape = "logits", (rows, length, model.config.text_config.vocab_size)
    total = 0.0
    pieces = score_tokens(
        model,
        tokens,
        chunk=_CHUNK.value,
        decode_from=_DECODE_FROM.value,
        with_logits=not _LOGPROBS_ONLY.value,
        images=images,
    )
    # Every process goes through all pieces, one writes them.
    writer = ArrayFileWriter(_OUT.value, name, shape) if is_first_process() else contextlib.nullcontext()
    with writer as file, progress_bar(FLAGS.verbose) as bar:
        task = bar.add_task("tokens", total=tokens.size)
        for piece in pieces:
            if file is not None:
                file.write(piece.row, piece.position, piece.logprobs if piece.logits is None else piece.logits)
            total += float(piece.logprobs.sum(dtype=np.float64))
            bar.update(task, advance=piece.tokens)
    return name, shape, total / (rows * (length - 1)) if length > 1 else None


def _perplexity(mean: float | None) -> float | None:
    if mean is None or math.isnan(mean):
        return mean
    return math.exp(-mean) if -mean < math.log(sys.float_info.max) else math.inf


def _json_number(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


def _print(report: dict[str, Any]) -> None:
    if report["predictions"]:
        print(f"perplexity {report['perplexity']:.6g} (mean log-probability {report['mean_logprob']:.6f}, "
              f"{report['predictions']:,} predictions)")  # fmt: skip
    if is_first_process():
        print(f"{report['out']}: {report['array']} {report['shape']}", file=sys.stderr)


def _images(config: ModelConfig, tokens: np.ndarray) -> list[list[PreparedImage]]:
    """The images of each row."""
    if _IMAGES.given and len(tokens) > 1:
        raise DSV41Error(f"{_TOKENS.value}: --image needs one row of tokens, got {len(tokens)}")
    images = [_IMAGES.read(config) if i == 0 else [] for i in range(len(tokens))]
    for i, (row, own) in enumerate(zip(tokens, images, strict=True)):
        check_images(config, row, own, what=f"{_TOKENS.value}: row {i}")
    return images


def main() -> None:
    _MESH.start()
    for name in ("tokens", "out"):
        if FLAGS[name].value is None:
            raise DSV41Error(f"--{name}=FILE.safetensors is required")
    if is_first_process():
        check_target(_OUT.value)
    tokens = read_tokens(_TOKENS.value)
    config = _MODEL.config()
    check_tokens(config, tokens, chunk=_CHUNK.value, decode_from=_DECODE_FROM.value)
    if _LOGPROBS_ONLY.value and tokens.shape[1] < 2:
        raise DSV41Error(f"{_TOKENS.value}: --logprobs_only needs two tokens a row or more, got 1")
    images = _images(config, tokens)
    model, load_s = _MODEL.load(vision=_IMAGES.given, mesh=_MESH)
    check_same_input(
        tokens=repr(tokens.shape).encode() + tokens.tobytes(),
        images=image_bytes([image for row in images for image in row]),
    )
    started = time.perf_counter()
    name, shape, mean = _score_to_file(model, tokens, images)
    report = {
        "perplexity": _perplexity(mean),
        "mean_logprob": mean,
        "predictions": tokens.shape[0] * (tokens.shape[1] - 1),
        "out": _OUT.value,
        "array": name,
        "shape": list(shape),
        "timings": {"load_s": load_s, "score_s": time.perf_counter() - started},
    }
    if _JSON.value:
        print(json.dumps(report | {key: _json_number(report[key]) for key in ("perplexity", "mean_logprob")}))
    else:
        _print(report)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
