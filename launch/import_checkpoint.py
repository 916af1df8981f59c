"""Imports a released checkpoint: an orbax copy (OCDBT) that is read onto any mesh, with a checksum for every tensor.

    python -m launch.import_checkpoint --checkpoint=DIR --out=NEW_DIR
    python -m launch.import_checkpoint --out=NEW_DIR --check

--checkpoint is a directory in the released layout: config.json, tokenizer.json and *.safetensors, with or without an
index. NEW_DIR is made; it needs as much free disk as the checkpoint takes. Afterwards it stands for DIR wherever a
script has --checkpoint. Stored formats are kept byte for byte, and the JSON files are copied along.

The checkpoint is written piece by piece, at most 1 GiB or one parameter in memory. To go on after an interruption, a
kill or a full disk, give the same command again: it continues behind the last complete piece. Pieces of the earlier
run are read back and compared with their checksums first, and damaged ones are written again; --noverify trusts them.
NEW_DIR can be loaded once the last line of a run says that it is complete. The source is not needed any more then.

With --check nothing is written: everything in NEW_DIR is read and compared with its checksums, and the exit status is
2 if something is damaged.

Progress goes to stderr: a bar on a terminal, otherwise a line now and then, with the time that is left. With --json,
stdout is exactly one JSON object: out, tensors, bytes, pieces, kept (pieces of an earlier run), mended (names of pieces
that were damaged and written again) and seconds.
"""

import collections
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from dsv41.checkpoint import check_import
from dsv41.checkpoint.import_checkpoint import ImportReport, import_checkpoint
from dsv41.checkpoint.imported import record_bytes
from dsv41.checkpoint.load_parameters import Progress
from dsv41.config import DSV41Error
from launch.cli import new_flags, run
from launch.load_model import progress_bar

FLAGS = new_flags()
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Directory in the released layout to import.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory of the import.", flag_values=FLAGS)
_CHECK = flags.DEFINE_bool("check", False, "Only read --out and compare it with its checksums.", flag_values=FLAGS)
_VERIFY = flags.DEFINE_bool("verify", True, "Read pieces of an earlier run back.", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

_LINE_EVERY_S = 10.0
_SPEED_OVER_S = 60.0


class ProgressLines:
    """Says on stderr how far a job is, at most every few seconds; the speed is that of the last minute.

    Args:
      every_s: seconds between lines; the last piece always has one.
      clock: seconds.
    """

    def __init__(self, every_s: float = _LINE_EVERY_S, clock=time.monotonic):
        self._every_s, self._clock = every_s, clock
        self._said = clock()
        self._samples = collections.deque([(self._said, 0)])

    def __call__(self, done: int, total: int, name: str) -> None:
        now = self._clock()
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[1][0] < now - _SPEED_OVER_S:
            self._samples.popleft()
        if now - self._said < self._every_s and done < total:
            return
        self._said = now
        (before, had), *_ = self._samples
        speed = (done - had) / max(now - before, 1e-3)
        left = round((total - done) / max(speed, 1))
        unit, size = ("GiB", 2**30) if total >= 2**33 else ("MiB", 2**20)
        print(
            f"{done / size:,.1f} of {total / size:,.1f} {unit}, {speed / 2**20:,.0f} MiB/s, "
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left, {name}",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield ProgressLines(0.0 if FLAGS.verbose else _LINE_EVERY_S)
        return
    with progress_bar(FLAGS.verbose, in_bytes=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total)


def _import() -> ImportReport:
    with _progress("importing") as progress:
        return import_checkpoint(_CHECKPOINT.value, _OUT.value, verify=_VERIFY.value, progress=progress)


def _check() -> ImportReport:
    with _progress("checking") as progress:
        imported = check_import(_OUT.value, progress=progress)
    pieces = len(imported.records)
    return ImportReport(len(imported), sum(map(record_bytes, imported.records)), pieces, pieces, ())


def _print(report: dict[str, Any]) -> None:
    told = f"{report['tensors']:,} tensors, {report['bytes']:,} bytes in {report['pieces']:,} pieces"
    if _CHECK.value:
        print(f"{report['out']}: {told}: all have their checksums")
        return
    mended = f", mended {', '.join(report['mended'])}" if report["mended"] else ""
    print(f"{report['out']}: complete: {told}, {report['kept']:,} of them from an earlier run{mended}")


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out=DIR is required")
    if _CHECK.value == (_CHECKPOINT.value is not None):
        raise DSV41Error("give either --checkpoint=DIR, to import, or --check")
    started = time.perf_counter()
    report = _check() if _CHECK.value else _import()
    fields = {"out": _OUT.value, **report._asdict(), "seconds": time.perf_counter() - started}
    if _JSON.value:
        print(json.dumps(fields))
    else:
        _print(fields)


def cli() -> int:
    """The console script."""
    # Nothing is computed, and an accelerator may be in use elsewhere.
    jax.config.update("jax_platforms", "cpu")
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
