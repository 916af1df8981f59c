"""A model card: what was measured, and how the model came about, as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def model_card(results: Mapping[str, Any], records: Sequence[Mapping[str, Any]] = ()) -> str:
    """The card of a model.

    Args:
      results: of `launch.evaluate`: `model`, `corpus`, `command` and `machine`, and of the parts that were run
        `perplexity`, `needle` and `acceptance`; perhaps the name of a `picture` beside the card.
      records: of the runs that trained it, JSON values of any shape; a `command` is shown as one.
    """
    parts = [
        [f"# Model card: {results['model']['name']}", *_model(results["model"])],
        _training(records),
        _perplexity(results.get("perplexity")),
        _needle(results.get("needle"), results.get("picture")),
        _acceptance(results.get("acceptance")),
        _measured(results),
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"DeepSeek-V4.1-Flash architecture with {model['parameters']:,} parameters and a context of "
        f"{model['context']:,} tokens; {model['bytes']:,} bytes in the released layout."
    )


def _training(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if records:
        yield "## Training"
    for record in records:
        if command := record.get("command"):
            yield _code(command if isinstance(command, str) else shlex.join(command))
        yield _table(("", ""), list(_flat({name: value for name, value in record.items() if name != "command"})))


def _perplexity(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    every = found["all"]
    yield "## Held-out files"
    yield (
        f"Loss {every['loss']:.3f} nats a token, perplexity **{every['perplexity']:.2f}**, "
        f"{every['bits_per_byte']:.3f} bits a byte: {every['tokens']:,} tokens of {len(found['files'])} of "
        f"{found['held_out']} files that no training saw, in parts of up to {found['context']:,} tokens."
    )
    rows = [
        (
            f"`{f['name']}`",
            f"{f['tokens']:,}",
            f"{f['loss']:.3f}",
            f"{f['perplexity']:.2f}",
            f"{f['bits_per_byte']:.3f}",
        )
        for f in found["files"]
    ]
    yield _table(("file", "tokens", "loss", "perplexity", "bits a byte"), rows)


def _needle(found: Mapping[str, Any] | None, picture: str | None) -> Iterator[str]:
    if found is None:
        return
    yield "## Recall"
    yield (
        f"Facts that cannot be guessed stand once in held-out code and are asked for at its end, {found['answers']} "
        "of them for each length. An answer counts if all of its tokens are what decoding at temperature 0 gives. "
        f"Depth 0 is the beginning of the text. Windows of {found['window']} tokens reach back {found['reach']} "
        "through all layers; what is further back is known from selected compressed entries only."
    )
    if picture:
        yield f"![accuracy by length and depth]({picture})"
    rows = [
        (f"{length:,}", f"**{mean:.0%}**", *(f"{share:.0%}" for share in shares))
        for length, mean, shares in zip(found["lengths"], found["by_length"], found["accuracy"], strict=True)
    ]
    yield _table(("tokens", "all", *(f"depth {d:g}" for d in found["depths"])), rows)


def _acceptance(found: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    if found is None:
        return
    yield "## Speculative decoding"
    first = found[0]
    yield (
        f"{first['prompts']} prompts of {first['prompt_tokens']} tokens of held-out files, up to "
        f"{first['max_new_tokens']} new tokens each. The acceptance length is accepted drafts a round, and one; passes "
        f"are those of the backbone behind the prompt."
    )
    rows = [
        (
            f"{f['temperature']:g}",
            f"**{f['acceptance_length']:.2f}**",
            f"{f['new_tokens']:,}",
            f"{f['plain_passes']:,}",
            f"{f['rounds']:,}",
            f"**{f['fewer_passes']:.2f}x**",
            " ".join("-" if share is None else f"{share:.0%}" for share in f["by_position"]),
        )
        for f in found
    ]
    yield _table(
        ("temperature", "acceptance length", "new tokens", "passes without drafts", "rounds", "fewer", "draft 1, 2, …"),
        rows,
    )
    for f in found:
        if f["identical_to_plain"] is not None:
            yield (
                f"At temperature {f['temperature']:g}, {f['identical_to_plain']} of {f['prompts']} texts are, token by "
                "token, those of plain decoding."
            )


def _measured(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## How this was measured"
    yield _code(results["command"])
    yield _table(("", ""), [*_flat({"corpus": results["corpus"]}), *_flat(results["machine"])])


def _flat(values: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, str]]:
    """Rows of a table: nested names joined by a dot; what is nested deeper is in one cell."""
    for name, value in values.items():
        if isinstance(value, Mapping) and not stem:
            yield from _flat(value, f"{name}.")
        else:
            yield f"{stem}{name}".replace("_", " "), _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}".replace("_", " ") for name, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def _code(command: str) -> str:
    return "\n".join(f"    {line}" for line in command.splitlines())
