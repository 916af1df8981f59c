"""What a run shows and leaves at its end."""

import pytest

from dsv41.train.loop import LoopOptions, resume
from launch.training_progress import train_and_report
from tests.train import test_loop


@pytest.mark.parametrize("log_every", [1, 100])
def test_the_picture_is_drawn_of_rows_if_there_are_any(log_every, tmp_path, capsys):
    """A first look at a run of two steps has no row yet where every hundredth step is one."""
    folder = tmp_path / "run"
    parts = test_loop.parts(folder)
    state, begin = resume(parts, test_loop.begin())
    train_and_report(folder, parts, state, begin, LoopOptions(steps=2, log_every=log_every), verbose=False)
    assert "step 2 of 12" in capsys.readouterr().out
    assert (folder / "curves.png").exists() == (log_every == 1)
