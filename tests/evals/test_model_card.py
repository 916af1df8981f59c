"""The card says what was measured and recorded, and nothing of what was not."""

from dsv41.evals.model_card import model_card

BASE = {
    "command": "python -m launch.evaluate --checkpoint=DIR --out=OUT",
    "model": {"name": "nano", "parameters": 22_400_000, "bytes": 19_700_000, "context": 4096},
    "corpus": {"python_version": "3.11.7", "documents": 485},
    "machine": {"device": "cpu"},
}
FILE = {"name": "a|b.py", "bytes": 9000, "tokens": 2500, "loss": 1.2345, "perplexity": 3.4367, "bits_per_byte": 0.49}
MEASURED = {
    "perplexity": {"context": 4096, "held_out": 29, "all": FILE | {"name": "all", "tokens": 25000}, "files": [FILE]},
    "needle": {
        "lengths": [256, 4000], "depths": [0.0, 0.8], "answers": 8, "window": 64, "reach": 512,
        "by_length": [1.0, 0.625], "accuracy": [[1.0, 1.0], [0.25, 1.0]],
    },
    "acceptance": [
        {
            "temperature": t, "prompts": 16, "prompt_tokens": 256, "max_new_tokens": 128, "new_tokens": 2048,
            "rounds": 700, "acceptance_length": 2.91, "by_position": [0.8, None], "plain_passes": 2032,
            "fewer_passes": 2.903, "identical_to_plain": 15 if t == 0 else None,
        }
        for t in (0.0, 1.0)
    ],
}  # fmt: skip
RECORD = {
    "command": "python -m launch.train \\\n  --seed=3",
    "seed": 3,
    "final": {"loss": 1.23456789, "tokens": 40_000_000},
    "packages": ["jax", "numpy"],
    "text": {"bytes": 57_000_000, "versions": {"jax": "0.11.2", "ml_dtypes": "0.6.0"}},
    "resumed": True,
}
RECORDS = [RECORD, {"command": ["python", "-m", "launch.train_dspark", "--text=a b"], "seed": 4}]


def test_all_of_it():
    card = model_card(BASE | MEASURED | {"picture": "needle.png"}, RECORDS)
    assert card.startswith("# Model card: nano\n\n") and card.endswith("|\n")
    headings = [line[3:] for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        "Training", "Held-out files", "Recall", "Speculative decoding", "How this was measured",
    ]  # fmt: skip
    for line in (
        "    python -m launch.train \\",
        "      --seed=3",
        "    python -m launch.train_dspark '--text=a b'",
        "| seed | 3 |",
        "| seed | 4 |",
        "| final.loss | 1.23457 |",
        "| final.tokens | 40,000,000 |",
        "| packages | jax, numpy |",
        "| text.bytes | 57,000,000 |",
        "| text.versions | jax 0.11.2, ml dtypes 0.6.0 |",
        "| resumed | yes |",
        "| `a\\|b.py` | 2,500 | 1.234 | 3.44 | 0.490 |",
        "![accuracy by length and depth](needle.png)",
        "| tokens | all | depth 0 | depth 0.8 |",
        "| 4,000 | **62%** | 25% | 100% |",
        "| 0 | **2.91** | 2,048 | 2,032 | 700 | **2.90x** | 80% - |",
        "    python -m launch.evaluate --checkpoint=DIR --out=OUT",
        "| corpus.python version | 3.11.7 |",
    ):
        assert line in card.splitlines(), line
    assert "perplexity **3.44**" in card and "25,000 tokens of 1 of 29 files" in card
    assert "Windows of 64 tokens reach back 512 through all layers" in card
    assert card.count("of 16 texts") == 1 and "At temperature 0, 15 of 16 texts" in card
    rows = [line.replace("\\|", "").count("|") for line in card.splitlines() if line.startswith("|")]
    assert set(rows) == {3, 5, 6, 8}


def test_what_was_not_measured_is_not_there():
    card = model_card(BASE)
    assert [line for line in card.splitlines() if line.startswith("#")] == [
        "# Model card: nano", "## How this was measured",
    ]  # fmt: skip
    assert "![" not in model_card(BASE | {"needle": MEASURED["needle"]})
