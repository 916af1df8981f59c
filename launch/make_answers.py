"""Lets a model continue many prompts and writes the texts into a file, to train its drafter on what it says itself.

    python -m launch.make_answers --checkpoint=DIR --corpus=corpus.jsonl.gz --count=20000 --out=answers.jsonl
    python -m launch.make_answers --checkpoint=DIR --prompts=FILE.jsonl --max_new_tokens=1024 --out=answers.jsonl
    python -m launch.train_dspark --checkpoint=DIR --text=answers.jsonl --out=RUN

Prompts are beginnings of --prompt_tokens tokens at random lines of the training documents of a corpus (or, near a
document's end, at the last place with as many tokens): of --corpus or --text, else of the standard library of the
running interpreter. Documents come in turn, in an order that --seed says. Or they are those of --prompts or --tokens,
as they are. Prompt i draws with --seed plus i: what it says does not depend on --batch (on CPU; elsewhere but for
near-ties).

--out is a file with a JSON object a line: name, text (prompt and answer, without special tokens), prompt_tokens,
new_tokens, finish_reason ("stop" or "length") and key, which stands for prompt, flags and model. The lines of a batch
are appended when it has ended. The same command goes on where a run was stopped; with a larger --count it adds more. A
file that was begun with other flags or another model is refused.

With --json, stdout is exactly one JSON object with out, texts (in the file), and of this run new_texts, stopped (texts
that the model ended itself), new_tokens, tokens_per_s (null if nothing was to be done) and timings; generate_s does not
contain compile_s.
"""

import dataclasses
import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from dsv41.checkpoint.identity import checkpoint_identity
from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.config.atomic_file import check_target
from dsv41.engine import PREFILL_CHUNK, check_prompts
from dsv41.evals.acceptance import code_prompts
from dsv41.evals.answers import AnswerCounts, answer_requests, append_answers, keep_answers, open_answers
from dsv41.models import check_images
from dsv41.ops.sampling import SamplingParams
from launch.cli import new_flags, run
from launch.engram import EngramFlags
from launch.load_model import ModelFlags, progress_bar
from launch.prompts import PromptFlags
from launch.sampling import SamplingFlags
from launch.training_flags import CorpusFlags

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_OUT = flags.DEFINE_string("out", None, "The file to write or to go on with, FILE.jsonl.", flag_values=FLAGS)
_CORPUS = CorpusFlags(FLAGS)
_COUNT = flags.DEFINE_integer("count", 1000, "Prompts out of the corpus.", flag_values=FLAGS)
_PROMPT_TOKENS = flags.DEFINE_integer(
    "prompt_tokens", 64, "Tokens of each prompt out of the corpus, <bos> included.", flag_values=FLAGS
)
_PROMPTS = PromptFlags(FLAGS)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 448, "Tokens to generate at most for each prompt.", flag_values=FLAGS
)
_BATCH = flags.DEFINE_integer("batch", 64, "Prompts that run together.", flag_values=FLAGS)
_SAMPLING = SamplingFlags(
    FLAGS, "Of the choice of prompts; prompt i draws with the seed plus i.",
    temperature=SamplingParams.temperature,
)  # fmt: skip
_PREFILL_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", PREFILL_CHUNK, "Prompt tokens a step; memory grows with it.", flag_values=FLAGS
)
_ENGRAM = EngramFlags(FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

_OF_A_CORPUS = (*CorpusFlags.NAMES, _COUNT.name, _PROMPT_TOKENS.name)
_GIVEN = ("prompts", "tokens")


def _given(names: tuple[str, ...]) -> list[str]:
    return [f"--{name}" for name in names if FLAGS[name].present]


def _check(config: ModelConfig) -> None:
    """Finds out before anything is read what cannot be.

    Raises:
      DSV41Error: a flag is missing, out of range or contradicts another; names it.
    """
    if _OUT.value is None:
        raise DSV41Error("--out=FILE.jsonl is required")
    if not _OUT.value.endswith(".jsonl"):  # another name would be read as one long text
        raise DSV41Error(f"--out: expected a name that ends in .jsonl, got {_OUT.value}")
    check_target(_OUT.value)
    if (files := _given(_GIVEN)) and (others := _given(_OF_A_CORPUS)):
        raise DSV41Error(f"{files[0]} says what the prompts are: give it without {', '.join(others)}")
    for flag, least in ((_COUNT, 1), (_PROMPT_TOKENS, 2), (_BATCH, 1), (_PREFILL_CHUNK, 1)):
        if flag.value < least:
            raise DSV41Error(f"--{flag.name}: expected {least} or more, got {flag.value}")
    if not files:
        try:
            check_prompts(config, [np.zeros(_PROMPT_TOKENS.value, np.int64)], _MAX_NEW_TOKENS.value)
        except DSV41Error as e:
            raise DSV41Error(f"--prompt_tokens and --max_new_tokens: {e}") from e


def _prompts(config: ModelConfig, seed: int) -> list[list[int]]:
    """Token ids of each."""
    tokenizer = _MODEL.tokenizer()
    if _given(_GIVEN):
        return _PROMPTS.read(_MODEL, config)
    documents = _CORPUS.corpus().train
    order = np.random.default_rng(seed).permutation(len(documents))
    return code_prompts(
        [documents[i] for i in order], tokenizer, config, count=_COUNT.value, tokens=_PROMPT_TOKENS.value, seed=seed
    )


def _identity(config: ModelConfig) -> str:
    """Of the model with the fields that --set changes."""
    fields = json.dumps(config_to_dict(config), sort_keys=True)
    return hashlib.sha256(f"{checkpoint_identity(_MODEL.checkpoint)}\n{fields}".encode()).hexdigest()


def _report(texts: int, made: AnswerCounts | None, load_s: float, total_s: float) -> dict[str, Any]:
    """The JSON object; `made` is None if the file was complete."""
    new = dataclasses.asdict(made or AnswerCounts(texts=0, stopped=0, new_tokens=0, compile_s=0.0))
    generate_s = total_s - new["compile_s"]
    return {
        "out": _OUT.value,
        "texts": texts,
        "new_texts": new["texts"],
        "stopped": new["stopped"],
        "new_tokens": new["new_tokens"],
        "tokens_per_s": new["new_tokens"] / generate_s if made else None,
        "timings": {"load_s": load_s, "compile_s": new["compile_s"], "generate_s": generate_s},
    }


def _print(report: dict[str, Any]) -> None:
    if _JSON.value:
        print(json.dumps(report))
    elif not report["new_texts"]:
        print(f"{report['out']}: all {report['texts']:,} texts are there already")
    else:
        print(
            f"{report['new_texts']:,} texts of {report['new_tokens']:,} new tokens, {report['stopped']:,} of them "
            f"ended by the model; {report['tokens_per_s']:,.0f} tokens/s; {report['out']}: {report['texts']:,} texts"
        )


def main() -> None:
    config = _MODEL.config()
    _check(config)
    sampling = _SAMPLING.read()
    prompts = _prompts(config, sampling.seed)
    for i, ids in enumerate(check_prompts(config, prompts, _MAX_NEW_TOKENS.value)):
        check_images(config, ids, (), what=f"prompt {i}")
    requests = answer_requests(prompts, sampling, max_new_tokens=_MAX_NEW_TOKENS.value, identity=_identity(config))
    with open_answers(_OUT.value) as file:
        kept = keep_answers(file, requests)
        if kept == len(requests):
            _print(_report(kept, None, 0.0, 0.0))
            return
        model, load_s = _MODEL.load()
        model = _ENGRAM.place(model)
        started = time.perf_counter()
        with progress_bar(FLAGS.verbose) as bar:
            task = bar.add_task("tokens", total=None)
            made = append_answers(
                model,
                requests,
                file,
                kept=kept,
                batch=_BATCH.value,
                prefill_chunk=_PREFILL_CHUNK.value,
                engram=_ENGRAM.mode,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        _print(_report(len(requests), made, load_s, time.perf_counter() - started))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
