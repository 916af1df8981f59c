"""An import of tiny_text that the tests of a process share."""

import shutil

import pytest

from dsv41.checkpoint.import_checkpoint import import_checkpoint
from tests.checkpoint_files import TINY


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """Not to be changed."""
    out = tmp_path_factory.mktemp("import") / "out"
    import_checkpoint(TINY, out)
    return out


@pytest.fixture
def copy_of_import(imported, tmp_path):
    return shutil.copytree(imported, tmp_path / "copy")
