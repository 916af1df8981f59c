"""The rows that a run leaves, also when it was cut off and goes on."""

import sys

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.train.curves import Curves, panels, read_curves
from launch.plots import plot_curves


def rows(curves, first, last):
    for step in range(first, last + 1):
        curves.append(step, 100 * step, {"loss": 1 / step, "learning_rate": 1e-3 * step, "recall": 0.1})


def test_rows(tmp_path):
    with Curves(tmp_path) as curves:
        curves.append(1, 10**13, {"loss": 0.1, "recall": float("nan")})
        assert (tmp_path / "curves.csv").read_text() == "step,tokens,loss,recall\n1,10000000000000,0.1,nan\n"
        curves.append(2, 2 * 10**13, {"recall": 1, "loss": np.float32(0.1)})
    columns = read_curves(tmp_path / "curves.csv")
    assert list(columns) == ["step", "tokens", "loss", "recall"]
    assert columns["tokens"].tolist() == [10**13, 2 * 10**13] and columns["tokens"].dtype == np.int64
    assert columns["loss"].tolist() == [0.1, float(np.float32(0.1))]
    assert np.isnan(columns["recall"][0]) and columns["recall"][1] == 1


def test_a_run_that_goes_on_leaves_the_same_file(tmp_path):
    """Cut off at step 9, in the middle of a row, and restored at step 6."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    with Curves(tmp_path / "whole") as curves:
        rows(curves, 1, 12)
    curves = Curves(tmp_path / "cut")
    rows(curves, 1, 9)
    curves.close()
    file = tmp_path / "cut" / "curves.csv"
    file.write_bytes(file.read_bytes()[:-7])
    with Curves(tmp_path / "cut") as curves:
        assert file.read_text().endswith("\n") and read_curves(file)["step"].tolist() == list(range(1, 9))
        curves.truncate(6)
        assert read_curves(file)["step"].tolist() == list(range(1, 7))
        rows(curves, 7, 12)
    assert file.read_bytes() == (tmp_path / "whole" / "curves.csv").read_bytes()
    assert [path.name for path in file.parent.iterdir()] == ["curves.csv"]


def test_truncated_while_open(tmp_path):
    with Curves(tmp_path) as curves:
        rows(curves, 1, 4)
        curves.truncate(9)
        assert read_curves(curves.path)["step"].tolist() == [1, 2, 3, 4]
        with pytest.raises(DSV41Error, match=r"curves\.csv: step 4 after step 4; truncate it to the step restored"):
            rows(curves, 4, 4)
        curves.truncate(2)
        rows(curves, 3, 3)
        assert read_curves(curves.path)["step"].tolist() == [1, 2, 3]
        # From the start, and the columns may be others.
        curves.truncate(0)
        assert not curves.path.exists()
        curves.append(1, 5, {"accuracy": 0.5})
        assert curves.path.read_text() == "step,tokens,accuracy\n1,5,0.5\n"


def test_columns_stay(tmp_path):
    with Curves(tmp_path) as curves:
        rows(curves, 1, 2)
    with Curves(tmp_path) as curves:
        with pytest.raises(DSV41Error, match=r"curves\.csv: step 3: missing column learning_rate, recall"):
            curves.append(3, 300, {"loss": 1.0, "other": 2.0})
        with pytest.raises(DSV41Error, match=r"curves\.csv: step 3: new column other"):
            curves.append(3, 300, {"loss": 1.0, "learning_rate": 1.0, "recall": 0.0, "other": 2.0})
        with pytest.raises(DSV41Error, match=r"curves\.csv: a metric cannot be called tokens"):
            curves.append(3, 300, {"loss": 1.0, "learning_rate": 1.0, "recall": 0.0, "tokens": 2.0})
        rows(curves, 3, 3)
    assert read_curves(tmp_path / "curves.csv")["step"].tolist() == [1, 2, 3]


def test_another_file_name(tmp_path):
    """Evaluations have a file, and events, of their own."""
    with Curves(tmp_path, file="held_out.csv") as held_out, Curves(tmp_path) as curves:
        rows(curves, 1, 3)
        held_out.append(2, 200, {"lm_loss": 1.0})
    assert (tmp_path / "held_out.csv").read_text() == "step,tokens,lm_loss\n2,200,1.0\n"


@pytest.mark.parametrize(
    "text,message",
    [
        ("a,b\n1,2\n", "line 1: expected the columns step,tokens, got a,b"),
        ("step,tokens,loss\n1,2,3\n2,4\n", "line 3: expected 3 numbers, got '2,4'"),
        ("step,tokens,loss\n1,2,x\n", "line 2: expected 3 numbers, got '1,2,x'"),
        ("step,tokens,loss\n1.5,2,1\n", "line 2: expected 3 numbers, got '1.5,2,1'"),
    ],
)
def test_another_file(tmp_path, text, message):
    (tmp_path / "curves.csv").write_text(text)
    with pytest.raises(DSV41Error, match=rf"curves\.csv: {message}"):
        Curves(tmp_path)
    assert (tmp_path / "curves.csv").read_text() == text


def test_no_folder_and_no_rows(tmp_path):
    with pytest.raises(DSV41Error, match=r"no such directory .*missing"):
        Curves(tmp_path / "missing")
    with pytest.raises(DSV41Error, match=r"curves\.csv: no such file"):
        read_curves(tmp_path / "curves.csv")
    (tmp_path / "curves.csv").write_text("step,tokens,loss\n")
    with pytest.raises(DSV41Error, match=r"curves\.csv: no rows of a training run"):
        read_curves(tmp_path / "curves.csv")


# --- pictures and events


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    with Curves(tmp_path) as curves:
        rows(curves, 1, 20)
    plot_curves(curves.path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_panels():
    columns = ["step", "tokens", "tokens_per_second", "loss", "what_else", "lm_loss", "learning_rate", "imbalance"]
    assert list(panels(columns).items()) == [
        ("loss (nats a token)", ["loss", "lm_loss"]),
        ("learning rate", ["learning_rate"]),
        ("expert load imbalance", ["imbalance"]),
        ("tokens a second", ["tokens_per_second"]),
        ("what_else", ["what_else"]),
    ]


def test_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DSV41Error, match=r"curves: matplotlib is not installed \(pip install 'dsv41\[train\]'\)"):
        plot_curves(tmp_path / "curves.csv", tmp_path / "curves.png")


def _events(folder):
    """(step, loss) of all event files, and the steps from which on earlier ones are void."""
    from tensorboardX.proto.event_pb2 import Event

    losses, purged = [], []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            # The framing of a record is: length, its checksum, data, its checksum.
            size = int.from_bytes(data[:8], "little")
            payload, data = data[12 : 12 + size], data[12 + size + 4 :]
            assert len(payload) == size
            event = Event.FromString(payload)
            if event.session_log.status == event.session_log.START:
                purged.append(event.step)
            losses += [(event.step, v.simple_value) for v in event.summary.value if v.tag == "loss"]
    return losses, purged


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    with Curves(tmp_path, tensorboard=True) as curves:
        rows(curves, 1, 4)
    with Curves(tmp_path, tensorboard=True) as curves:
        curves.truncate(2)
        rows(curves, 3, 3)
    losses, purged = _events(tmp_path / "tensorboard")
    assert sorted(losses) == sorted((s, float(np.float32(1 / s))) for s in (1, 2, 3, 4, 3))
    assert 3 in purged


def test_tensorboard_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(DSV41Error, match=r"tensorboardX is not installed \(pip install 'dsv41\[train\]'\)"):
        Curves(tmp_path, tensorboard=True)
