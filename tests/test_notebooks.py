"""Every notebook is one test: it runs from top to bottom, in a process of its own."""

import pytest
import run_notebooks

notebooks = run_notebooks.find([])


@pytest.fixture(scope="module")
def outcomes(request):
    """The selected notebooks, started together, a few at a time."""
    chosen = [i.callspec.params["path"] for i in request.session.items if i.fspath == request.node.fspath]
    return run_notebooks.run_all(chosen)


@pytest.mark.parametrize("path", notebooks, ids=lambda p: p.stem)
def test_notebook(outcomes, path):
    outcome = outcomes[path].result()
    if outcome.failed:
        pytest.fail(outcome.failed, pytrace=False)
