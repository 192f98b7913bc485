"""Settings that must be there before torch is first imported, and notebooks that run beside the other tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "agg")


def of_notebooks(item) -> bool:
    return item.path.name == "test_notebooks.py"


def pytest_collection_modifyitems(items):
    """Notebooks come last: until then they run in the background, on the cores that are left."""
    items.sort(key=of_notebooks)


def pytest_collection_finish(session):
    chosen = [item.callspec.params["path"] for item in session.items if of_notebooks(item)]
    if chosen and not session.config.option.collectonly:
        from run_notebooks import Runs

        session.config.notebook_runs = Runs(chosen, workers=max(min(os.cpu_count() or 1, 4) - 1, 1))


def pytest_sessionfinish(session):
    if runs := getattr(session.config, "notebook_runs", None):
        runs.stop()


def pytest_terminal_summary(terminalreporter, config):
    """The slowest notebooks: they run beside other tests, so the durations that pytest prints are not theirs."""
    if runs := getattr(config, "notebook_runs", None):
        done = [f.result() for f in runs.futures.values() if f.done() and not f.cancelled()]
        slowest = sorted(done, key=lambda outcome: -outcome.seconds)[:5]
        terminalreporter.write_line("notebooks: " + ", ".join(f"{o.name} {o.seconds:.0f} s" for o in slowest))
