"""Continues a prompt.

    python -m launch.generate --prompt="The quick brown fox" --max_new_tokens=24
    python -m launch.generate --checkpoint=DIR --prompt_ids=0,17,42 --temperature=0.6 --seed=1 --json
    python -m launch.generate --checkpoint=DIR --image=photo.jpg --prompt="What is this?"
    python -m launch.generate --checkpoint=DIR --prompt="def main():" --speculate=on
    python -m launch.generate --checkpoint=DIR --prompt="Once" --mesh=data=2,tensor=4

The text of --prompt is encoded by the checkpoint's tokenizer, and the config's bos_token_id is put before it unless the
encoding starts with it. --prompt_ids are used exactly as given. Generation ends at a stop id, which stays the last of
`token_ids` but has no text, or after --max_new_tokens.

Each --image=FILE goes where the prompt has an image token, in order: its id in --prompt_ids, its literal text in
--prompt. A prompt without image tokens gets the images first, behind a leading BOS. The token stands for the whole
image: prompt_tokens counts the span that it grows into, up to max_image_tokens of the config.

The text goes to stdout as it is generated, figures go to stderr. With --json, stdout is exactly one JSON object with
token_ids (the new ones), text (null without a tokenizer), prompt_tokens, finish_reason ("stop" or "length"), timings
and cache. Every step shape is run once without tokens before the clock starts; that time is compile_s. The time to the
first token does not contain it. Of the timings, engram says what Engram rows took: null without Engram.

With --prefill=ced only the last sliding_window tokens of the prompt go through the decoder half, as deployed. Of the
tokens before them the decoder's compressed KV is exact, but its window KV is missing, so that logits behind a longer
prompt differ a little. Up to sliding_window tokens it is the same.

--mesh spreads the model over devices, of several processes if they are started so (docs/pods.md). Process 0 prints.

With --speculate=on the timings also say how well that went: acceptance_length is accepted drafts a step and one,
mean_verified_length the drafts verified a step, tokens_per_forward what came of it behind the first token. The first
two are null without speculation.
"""

import json
import sys
from typing import Any

from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import PREFILL_CHUNK, GenerationResult, check_prompts, generate
from dsv41.engine.engine_options import CED, FULL, check_prefill
from dsv41.images import expand_images
from dsv41.sharding.agreement import check_same_input
from dsv41.sharding.processes import is_first_process
from launch.cli import new_flags, run
from launch.engram import EngramFlags, engram_report
from launch.images import ImageFlags, image_bytes
from launch.load_model import ModelFlags, progress_bar
from launch.mesh_flags import MeshFlags
from launch.sampling import SamplingFlags, StopFlags, parse_ids
from launch.serving import PREFILL_HELP
from launch.speculation import SpeculationFlags
from launch.text import TextPrinter, encode

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.", flag_values=FLAGS)
_PROMPT_IDS = flags.DEFINE_list("prompt_ids", None, "Token ids to continue, as 0,17,42.", flag_values=FLAGS)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 32, "Tokens to generate at most.", flag_values=FLAGS)
_SAMPLING = SamplingFlags(FLAGS)
_STOP = StopFlags(FLAGS)
_PREFILL = flags.DEFINE_enum("prefill", FULL, [CED, FULL], PREFILL_HELP, flag_values=FLAGS)
_PREFILL_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", PREFILL_CHUNK, "Prompt tokens a step; memory grows with it.", flag_values=FLAGS
)
_IMAGES = ImageFlags(FLAGS, "Each goes to the next image token of the prompt, or all before the text.")
_SPECULATION = SpeculationFlags(FLAGS)
_ENGRAM = EngramFlags(FLAGS)
_MESH = MeshFlags(FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)


def _prompt(config: ModelConfig) -> list[int]:
    if (_PROMPT.value is None) == (_PROMPT_IDS.value is None):
        raise DSV41Error("give either --prompt=TEXT or --prompt_ids=ID,ID,...")
    if _PROMPT_IDS.value is not None:
        return parse_ids("prompt_ids", _PROMPT_IDS.value)
    return encode(_MODEL.tokenizer(), _PROMPT.value, config.bos_token_id)


def report(result: GenerationResult, text: str | None, load_s: float) -> dict[str, Any]:
    """The JSON object."""
    t, rounds = result.timings, result.speculation
    plain = 1.0 if t.new_tokens > 1 else None
    return {
        "token_ids": list(result.token_ids),
        "text": text,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "timings": {
            "load_s": load_s,
            "compile_s": t.compile_s,
            "time_to_first_token_s": t.prefill_s,
            "prefill_s": t.prefill_s,
            "decode_s": t.decode_s,
            "prefill_tokens_per_s": t.prefill_tokens_per_s,
            "decode_tokens_per_s": t.decode_tokens_per_s,
            "acceptance_length": rounds and rounds.acceptance_length,
            "mean_verified_length": rounds and rounds.mean_verified,
            "tokens_per_forward": rounds.tokens_per_forward if rounds else plain,
            "engram": engram_report(result.engram),
        },
        "cache": {"kv_bytes_per_token": result.kv_bytes_per_token, "window_bytes": result.window_bytes},
    }


def _figures(result: GenerationResult, load_s: float) -> str:
    t = result.timings
    rate = "" if t.decode_tokens_per_s is None else f", then {t.decode_tokens_per_s:,.1f} tokens/s"
    rounds = result.speculation
    speculation = ""
    if rounds and rounds.rounds:
        speculation = (
            f"acceptance length {rounds.acceptance_length:.2f}, {rounds.mean_verified:.2f} drafts verified and "
            f"{rounds.tokens_per_forward:.2f} tokens a forward pass; "
        )
    return (
        f"{len(result.token_ids)} tokens ({result.finish_reason}) after a prompt of {result.prompt_tokens}: "
        f"first token in {t.prefill_s:.3f} s{rate}; {speculation}load {load_s:.1f} s, compile {t.compile_s:.1f} s; "
        f"KV measured on the cache arrays: {result.kv_bytes_per_token:,g} bytes a token, "
        f"window {result.window_bytes:,} bytes"
    )


def main() -> None:
    _MESH.start()
    config = _MODEL.config()
    sampling, stop = _SAMPLING.read(), _STOP.read(config)
    check_prefill(_PREFILL.value, config, _PREFILL_CHUNK.value)
    images, speculation = _IMAGES.read(config), _SPECULATION.read(config)
    ids = {"image_token_id": config.image_token_id, "bos_token_id": config.bos_token_id}
    prompt = expand_images(_prompt(config), images, **ids)
    check_prompts(config, [prompt], _MAX_NEW_TOKENS.value)
    model, load_s = _MODEL.load(vision=_IMAGES.given, drafter=speculation is not None, mesh=_MESH)
    check_same_input(prompt=repr(list(prompt)).encode(), images=image_bytes(images))
    model = _ENGRAM.place(model)
    printer = TextPrinter(model.tokenizer, stop)
    with progress_bar(FLAGS.verbose) as bar:
        task = bar.add_task("prefill", total=len(prompt))

        def on_prefill(done: int, total: int) -> None:
            bar.update(task, completed=done)
            if done == total:
                bar.stop()

        (result,) = generate(
            model,
            [prompt],
            max_new_tokens=_MAX_NEW_TOKENS.value,
            sampling=sampling,
            stop_ids=stop,
            prefill_chunk=_PREFILL_CHUNK.value,
            prefill=_PREFILL.value,
            images=[images],
            speculate=speculation,
            engram=_ENGRAM.mode,
            on_token=None if _JSON.value else lambda _, token: printer.push(token),
            on_prefill=on_prefill,
        )
    if _JSON.value:
        text = None if model.tokenizer is None else model.tokenizer.decode(result.text_ids, skip_special_tokens=True)
        print(json.dumps(report(result, text, load_s)))
    else:
        printer.finish()
        if is_first_process():
            print(_figures(result, load_s), file=sys.stderr)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
