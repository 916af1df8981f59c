"""What a model says itself, as a file of texts to train its drafter on (dspark.md section 3.2: on-policy output).

The file is JSON lines, which `dsv41.train.corpus_file.text_corpus` reads: a text a line, in the order of the requests.
Lines are appended after every batch, so that a run that was stopped goes on behind the last whole line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from tokenizers import Tokenizer

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import cannot_write, check_target
from dsv41.engine import PREFILL_CHUNK, EngramMode, GenerationResult, generate
from dsv41.evals.padded_rows import Progress
from dsv41.models import Model
from dsv41.ops.sampling import SamplingParams

_NAME = "answers/"
_BEGIN = f'{{"name": "{_NAME}'.encode()  # of every line
_KEY_DIGITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A prompt to continue.

    Attributes:
      number: of the prompt, as prompts were given.
      prompt: token ids.
      sampling: how tokens are drawn.
      max_new_tokens: drawn at most.
      key: 16 hex digits of a hash over all but the number, and over the model.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    key: str

    @property
    def name(self) -> str:
        return f"{_NAME}{self.number:08d}"

    def line(self, result: GenerationResult, tokenizer: Tokenizer) -> str:
        """The line of the file that says what became of it.

        Special tokens have no text: training puts its own around a document. Of a text that ends inside a character,
        the piece is left out.
        """
        text = tokenizer.decode([*self.prompt, *result.text_ids], skip_special_tokens=True)
        fields = {
            "name": self.name,
            "text": text.rstrip("\ufffd"),
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": len(result.token_ids),
            "finish_reason": result.finish_reason,
            "key": self.key,
        }
        return f"{json.dumps(fields)}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """What a run added to the file.

    Attributes:
      texts: lines.
      stopped: texts that the model ended itself.
      new_tokens: drawn, stop tokens included.
      compile_s: of the seconds that it took, those before the first step of each batch.
    """

    texts: int
    stopped: int
    new_tokens: int
    compile_s: float


def answer_requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_new_tokens: int, identity: str
) -> list[AnswerRequest]:
    """A request for each prompt, the longest first, so that those of a batch have similar lengths.

    Args:
      prompts: token ids of each.
      sampling: of the first prompt; prompt i draws with its seed plus i, whatever the batches are.
      max_new_tokens: tokens a request draws at most.
      identity: text that differs for models that say something else.

    Raises:
      DSV41Error: a seed is out of range.
    """
    requests = []
    for i, prompt in enumerate(prompts):
        own = dataclasses.replace(sampling, seed=sampling.seed + i)
        what = [identity, list(map(int, prompt)), dataclasses.asdict(own), max_new_tokens]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_KEY_DIGITS]
        fields = {"number": i, "prompt": tuple(what[1]), "sampling": own, "max_new_tokens": max_new_tokens}
        requests.append(AnswerRequest(**fields, key=key))
    return sorted(requests, key=lambda r: -len(r.prompt))


@contextlib.contextmanager
def open_answers(path: str | pathlib.Path) -> Iterator[IO[bytes]]:
    """The file, to read and to append to, made if it is missing; no other process has it so.

    Raises:
      DSV41Error: it cannot be opened or locked, or another process appends to it.
    """
    path = check_target(path)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a+b", buffering=0))
        except OSError as e:
            raise cannot_write(path, e) from e
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DSV41Error(f"{path}: another process appends to it") from e
        except OSError as e:
            raise DSV41Error(f"{path}: cannot be locked against other processes ({e.strerror or e})") from e
        yield file


def keep_answers(file: IO[bytes], requests: Sequence[AnswerRequest]) -> int:
    """How many of the requests the file has whole lines of; takes away a last line that was cut off.

    Args:
      file: of `open_answers`.
      requests: whose lines it should have, in order.

    Raises:
      DSV41Error: a line is that of another request or of none; names file and line. The file is as it was then.
    """
    file.seek(0)
    *lines, cut = file.read().split(b"\n")
    for number, (line, request) in enumerate(itertools.zip_longest(lines, requests[: len(lines)]), 1):
        _check_line(line, request, f"{file.name}, line {number}", len(requests))
    if cut:
        written = cut.rstrip(b"\0")  # a file system that lost its power may leave zeros
        if not written.startswith(_BEGIN[: len(written)]):
            raise DSV41Error(f"{file.name}, line {len(lines) + 1}: not the beginning of an answer")
        _truncate(file, sum(len(line) + 1 for line in lines))
    return len(lines)


def _check_line(line: bytes, request: AnswerRequest | None, where: str, count: int) -> None:
    try:
        found = json.loads(line)
        own = (found["name"], found["key"])
    except (ValueError, KeyError, TypeError) as e:
        raise DSV41Error(f"{where}: not an answer, expected an object with text, name and key") from e
    if request is None:
        raise DSV41Error(f"{where}: the file has more answers than the {count} that are asked for")
    if own != (request.name, request.key):
        raise DSV41Error(
            f"{where}: {own[0]} has the key {own[1]}, expected {request.name} with {request.key}: the file was begun "
            f"with other flags, other prompts or another model"
        )


def _truncate(file: IO[bytes], size: int) -> None:
    try:
        file.truncate(size)
        os.fsync(file.fileno())
    except OSError as e:
        raise cannot_write(pathlib.Path(file.name), e) from e


def append_answers(
    model: Model,
    requests: Sequence[AnswerRequest],
    file: IO[bytes],
    *,
    kept: int = 0,
    batch: int = 64,
    prefill_chunk: int = PREFILL_CHUNK,
    engram: EngramMode = EngramMode.AUTO,
    progress: Progress | None = None,
) -> AnswerCounts:
    """Continues the prompts, and appends the lines of every batch to the file when it has ended.

    Args:
      model: with its tokenizer.
      requests: of `answer_requests`.
      file: of `open_answers`.
      kept: of the requests, those at the beginning that the file has already.
      batch: prompts that run together. A last batch with fewer is filled up with copies of its last prompt, since
        another size would be another program.
      prefill_chunk, engram: as of `generate`.
      progress: called with (tokens drawn, tokens that may be drawn in all); those not drawn count with their batch.

    Raises:
      DSV41Error: as `generate`, or the file cannot be written.
    """
    texts = stopped = new_tokens = done = 0
    compile_s, rows = 0.0, min(batch, len(requests))
    total = sum(r.max_new_tokens for r in requests[kept:])
    for begin in range(kept, len(requests), rows):
        chosen = requests[begin : begin + rows]
        filled = [*chosen, *[chosen[-1]] * (rows - len(chosen))]
        results = generate(
            model,
            [r.prompt for r in filled],
            max_new_tokens=chosen[0].max_new_tokens,
            sampling=[r.sampling for r in filled],
            prefill_chunk=prefill_chunk,
            engram=engram,
            on_token=None if progress is None else _watch(progress, done, total, len(chosen)),
        )[: len(chosen)]
        _append(file, "".join(r.line(found, model.tokenizer) for r, found in zip(chosen, results, strict=True)))
        texts += len(chosen)
        stopped += sum(r.finish_reason == "stop" for r in results)
        new_tokens += sum(len(r.token_ids) for r in results)
        compile_s += results[0].timings.compile_s
        done += sum(r.max_new_tokens for r in chosen)
        if progress is not None:
            progress(done, total)
    return AnswerCounts(texts=texts, stopped=stopped, new_tokens=new_tokens, compile_s=compile_s)


def _watch(progress: Progress, done: int, total: int, rows: int) -> Callable[[int, int], None]:
    """For `generate`: reports about once a step what the first `rows` rows draw on top of what is `done`."""
    drawn = itertools.count(1)

    def on_token(row: int, _: int) -> None:
        if row < rows and not (number := next(drawn)) % rows:
            progress(done + number, total)

    return on_token


def _append(file: IO[bytes], lines: str) -> None:
    view = memoryview(lines.encode())
    try:
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    except OSError as e:
        raise cannot_write(pathlib.Path(file.name), e) from e
