"""Every notebook is one test: it runs from top to bottom, in a process of its own."""

import pytest
import run_notebooks


@pytest.mark.parametrize("path", run_notebooks.find([]), ids=run_notebooks.label)
def test_notebook(path):
    outcome = run_notebooks.isolated(path)
    print(f"{outcome.ran} cells in {outcome.seconds:.1f} s")
    if outcome.failed:
        pytest.fail(outcome.failed, pytrace=False)
