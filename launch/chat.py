"""Talks with a model in a terminal, and shows what each turn could reuse.

    python -m launch.chat --checkpoint=DIR
    python -m launch.chat --checkpoint=DIR --store=kv --turn="The quick brown" --turn=" fox jumps over" --json

A turn is a line of standard input, or the text of a --turn; end of input ends the session. The whole conversation is
sent again with every turn, and the engine goes on from the KV pages that earlier turns left: on the device, in host
memory, or with --store=DIR on disk, where a later run with the same turns finds them.

The conversation is a plain row of token ids: BOS once, then turn, answer, turn, answer, each encoded by itself with
nothing between them; a stop token stays in the row, an image token that the model drew does not. This continues text.
It is not the official chat encoding with its marks of who is speaking, so a line that should be an answer needs a
prompt that asks for one.

The answer goes to stdout. Figures of each turn go to stderr: prompt tokens whose KV was there and from where, those of
them that went through the encoder again to rebuild the window (or that a window snapshot was there), those computed
for the first time, the time to the first token and the rate behind it. At the end a table of the tiers says what they
hold and what they were good for. Compiling happens before the first turn.

With --json, stdout is an object a line: for each turn turn, prompt_tokens, token_ids, text, finish_reason ("stop" or
"length"), cached_tokens (by tier: hbm, host, ssd), replayed_tokens, fresh_tokens, window_hit, time_to_first_token_s,
tokens_per_s and acceptance_length (null without --speculate=on); and last an object with tiers.

Pages are kept for the checkpoint's identity: a hash over config.json, tokenizer.json and the index, names and sizes of
the safetensors files, and samples of their bytes. --store may be shared by several checkpoints.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from rich.console import Console

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import Engine, EngineOptions, EngineResult
from dsv41.ops.sampling import SamplingParams
from launch.cli import new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.sampling import SamplingFlags, StopFlags
from launch.serving import ServingFlags, request_figures, usage_table
from launch.speculation import SpeculationFlags
from launch.text import TextPrinter, encode, encode_plain

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_TURNS = flags.DEFINE_multi_string(
    "turn", [], "Text of a turn; may be given several times. Default: lines of standard input.", flag_values=FLAGS
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of an answer at most.", flag_values=FLAGS)
_SAMPLING = SamplingFlags(FLAGS, "Of the first turn; each has one more. Same seed, same draws.")
_STOP = StopFlags(FLAGS)
_SERVING = ServingFlags(FLAGS)
_SPECULATION = SpeculationFlags(FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of text.", flag_values=FLAGS)


class _Session:
    """A conversation: the tokens so far, and the engine that goes on from them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        config: ModelConfig,
        options: EngineOptions,
        sampling: SamplingParams,
        stop_ids: Sequence[int],
    ):
        self._engine, self._tokenizer = engine, tokenizer
        self._bos, self._image = config.bos_token_id, config.image_token_id
        self._room, self._sampling, self._stop = options.max_tokens, sampling, stop_ids
        self._ids: list[int] = []
        self._turns = 0

    def turn(self, text: str) -> dict[str, Any]:
        """Says `text`, prints the answer as it comes unless it goes into the JSON object, and returns the figures."""
        prompt = self._ids + _encode(self._tokenizer, text, self._bos, first=not self._ids)
        left = self._room - len(prompt)
        if left < 1:
            raise DSV41Error(
                f"turn {self._turns + 1}: the conversation has {len(prompt)} tokens, --max_tokens={self._room} leaves "
                f"no room for an answer"
            )
        printer = None if _JSON.value else TextPrinter(self._tokenizer, self._stop)
        request = self._engine.add(
            prompt,
            max_new_tokens=min(_MAX_NEW_TOKENS.value, left),
            sampling=_with_seed(self._sampling, self._turns),
            stop_ids=self._stop,
        )
        for token in self._engine.stream(request):
            if printer is not None:
                printer.push(token)
        if printer is not None:
            printer.finish()
        result = self._engine.take(request)
        self._turns += 1
        if result.error is not None:
            raise DSV41Error(f"turn {self._turns}: {result.error}")
        self._ids = prompt + _said(result.token_ids, self._image)
        return self._figures(result)

    def _figures(self, result: EngineResult) -> dict[str, Any]:
        stopped = result.finish_reason == "stop"
        words = result.token_ids[:-1] if stopped else result.token_ids
        return {
            "turn": self._turns,
            "prompt_tokens": result.prompt_tokens,
            "token_ids": list(result.token_ids),
            "text": self._tokenizer.decode(words, skip_special_tokens=True),
            "finish_reason": result.finish_reason,
            **request_figures(result.metrics, len(result.token_ids), speculation=FLAGS.speculate == "on"),
        }


def _said(answer: Sequence[int], image_token_id: int) -> list[int]:
    """What of an answer stays in the row: an image token that the model drew stands for no image, and is refused."""
    return [token for token in answer if token != image_token_id]


def _encode(tokenizer: Any, text: str, bos_token_id: int, *, first: bool) -> list[int]:
    return encode(tokenizer, text, bos_token_id, "turn") if first else encode_plain(tokenizer, text, "turn")


def _with_seed(sampling: SamplingParams, turn: int) -> SamplingParams:
    """The same parameters with the turn's own seed, so that no answer repeats the draws of the one before."""
    v = sampling
    return SamplingParams(temperature=v.temperature, top_p=v.top_p, top_k=v.top_k, seed=(v.seed + turn) % 2**32)


def _describe(report: dict[str, Any]) -> str:
    """A turn's figures in one line."""
    cached = {tier: n for tier, n in report["cached_tokens"].items() if n}
    total = sum(cached.values())
    origin = f" ({', '.join(f'{tier} {n}' for tier, n in cached.items())})" if cached else ""
    window = "window from a snapshot" if report["window_hit"] else f"{report['replayed_tokens']} of them replayed"
    reused = f"{total} reused{origin}, {window}" if total else "none reused"
    rate = "" if report["tokens_per_s"] is None else f", then {report['tokens_per_s']:,.1f} tokens/s"
    length = report["acceptance_length"]
    speculation = "" if length is None else f"; acceptance length {length:.2f}"
    return (
        f"[turn {report['turn']}: {report['prompt_tokens']} prompt tokens, {reused}, {report['fresh_tokens']} "
        f"computed; {len(report['token_ids'])} new ones ({report['finish_reason']}), the first in "
        f"{report['time_to_first_token_s']:.3f} s{rate}{speculation}]"
    )


def _lines() -> Iterator[str]:
    """Turns from standard input; blank lines are passed over."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _given(turns: Sequence[str]) -> Iterator[str]:
    """Turns from flags, shown as if they had been typed."""
    for text in turns:
        if not _JSON.value:
            print(f"> {text}", file=sys.stderr, flush=True)
        yield text


def _check_turns(tokenizer: Any, config: ModelConfig, options: EngineOptions) -> None:
    """Refuses turns that can never fit, before a long load."""
    if _MAX_NEW_TOKENS.value < 1:
        raise DSV41Error(f"--max_new_tokens: expected 1 or more, got {_MAX_NEW_TOKENS.value}")
    total = 0
    for i, text in enumerate(_TURNS.value):
        if not text:
            raise DSV41Error(f"--turn: turn {i + 1} is empty")
        total += len(_encode(tokenizer, text, config.bos_token_id, first=not i)) + 1
        if total > options.max_tokens:
            raise DSV41Error(
                f"--turn: the first {i + 1} turns and a token of answer to each are {total} tokens, more than "
                f"--max_tokens={options.max_tokens}"
            )


def main() -> None:
    config = _MODEL.config()
    sampling, speculation = _SAMPLING.read(), _SPECULATION.read(config)
    stop = _STOP.read(config)
    options = _SERVING.options(config, speculation, stop_ids=len(stop))
    tokenizer = _MODEL.tokenizer()
    _check_turns(tokenizer, config, options)
    with _SERVING.open(config, _MODEL.checkpoint) as stores:
        model, load_s = _MODEL.load(drafter=speculation is not None)
        engine = stores.engine(model, options)
        started = time.perf_counter()
        with progress_bar(FLAGS.verbose) as bar:
            bar.add_task("compiling", total=None)
            engine.warm_up()
        if not _JSON.value:
            print(f"[loaded in {load_s:.1f} s, compiled in {time.perf_counter() - started:.1f} s]", file=sys.stderr)
        session = _Session(engine, tokenizer, config, options, sampling, stop)
        for text in _given(_TURNS.value) if _TURNS.value else _lines():
            report = session.turn(text)
            if _JSON.value:
                print(json.dumps(report), flush=True)
            else:
                print(_describe(report), file=sys.stderr, flush=True)
        _print_usage(stores.usage(engine))


def _print_usage(usage: dict[str, dict[str, int]]) -> None:
    if _JSON.value:
        print(json.dumps({"tiers": usage}))
        return
    width = None if sys.stderr.isatty() else 120
    Console(file=sys.stderr, width=width, markup=False, highlight=False, emoji=False).print(usage_table(usage))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
