"""Every notebook is one test: it runs from top to bottom, in a process of its own.

They are started by conftest.py and run in the background while the other tests do.
"""

import pytest
import run_notebooks


@pytest.fixture(scope="module")
def outcomes(request):
    runs = request.config.notebook_runs
    runs.widen()  # the other tests are done, so their core is free
    return runs.futures


@pytest.mark.parametrize("path", run_notebooks.find([]), ids=lambda p: p.stem)
def test_notebook(outcomes, path):
    outcome = outcomes[path].result()
    print(f"{outcome.ran} cells in {outcome.seconds:.1f} s")
    if outcome.failed:
        pytest.fail(outcome.failed, pytrace=False)
