"""Run notebooks the way the tests do, and refresh the outputs stored in them.

    python scripts/run_notebooks.py                    # every notebook: run, store outputs
    python scripts/run_notebooks.py 04 nbs/index.ipynb # by number, name, path or folder (tutorials)
    python scripts/run_notebooks.py --flags gpu 08     # also the cells flagged `#| gpu`
    python scripts/run_notebooks.py --check            # run nothing: outputs present, no errors, no local paths

Cells flagged with one of `tst_flags` of settings.ini, cells with `#| eval: false` and notebooks with
`skip_exec: true` are left as they are, stored outputs included. A notebook that fails is not written.
Only standard output, results and pictures are stored: standard error holds warnings with one machine's paths.
Figures are stored as PNG, large ones (photographs) as JPEG.
"""

import argparse
import base64
import io
import os
import re
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path

root = Path(__file__).resolve().parent.parent
nbs = root / "nbs"
preload = ["torch", "diffusers.models.autoencoders", "matplotlib.pyplot", "execnb.shell", "nbdev.process"]
local_path = re.compile(r"/(?:root|home|Users|work|tmp)/[\w.-]+|[A-Z]:\\Users\\")


large = 120_000  # bytes of a stored PNG, above which a photograph is better stored as JPEG


@dataclass
class Outcome:
    """What became of one notebook."""

    name: str
    seconds: float = 0.0
    ran: int = 0  # cells executed
    failed: str = ""  # the failing cell and its traceback; empty if all is well


def skipped_flags() -> set[str]:
    """The flags whose cells are skipped, from settings.ini."""
    config = ConfigParser()
    config.read(root / "settings.ini", encoding="utf-8")
    return set(config["DEFAULT"]["tst_flags"].split())


def label(path: Path) -> str:
    """A notebook by its path within `nbs`, such as `tutorials/low_vram`."""
    return path.relative_to(nbs).with_suffix("").as_posix()


def find(names: list[str]) -> list[Path]:
    """The notebooks meant by `names`: paths, file names, stems, number prefixes or folders; all of them for none."""
    every = sorted((p for p in nbs.rglob("*.ipynb") if not re.search(r"/[_.]", f"/{label(p)}")), key=lambda p: (p.parent != nbs, p))
    if not names:
        return every
    found = []
    for name in names:
        stem = Path(name).stem
        hits = [p for p in every if p.stem == stem] or [p for p in every if p.stem.startswith(stem) or p.parent.name == stem]
        if not hits:
            raise SystemExit(f"no notebook matches {name!r}")
        found += hits
    return found


def slimmer(output: dict) -> dict:
    """`output` with a large PNG, as photographs make, replaced by a JPEG where that saves more than half."""
    png = output.get("data", {}).get("image/png", "")
    if len(png) < large:
        return output
    from PIL import Image

    jpeg = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").save(jpeg, "JPEG", quality=90, subsampling=0)
    text = base64.b64encode(jpeg.getvalue()).decode()
    if len(text) < len(png) / 2:
        output["data"] = {k: v for k, v in output["data"].items() if k != "image/png"} | {"image/jpeg": text}
    return output


def run(path: Path, force: frozenset[str] = frozenset(), store: bool = False) -> Outcome:
    """Run one notebook in this process, as `nbdev_test` would; with `store`, write its outputs back."""
    os.environ["IN_TEST"] = "1"
    os.chdir(path.parent)
    sys.path.insert(0, str(root))
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.clean import clean_nb
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor

    outcome, start = Outcome(path.name), time.perf_counter()
    parsed = NBProcessor(path, procs=FrontmatterProc, process=True).nb  # only to read the flags
    if str(getattr(parsed, "frontmatter_", {}).get("skip_exec", False)).lower() in {"true", "1"}:
        return outcome
    directives = {cell.id: cell.directives_ or {} for cell in parsed.cells if cell.cell_type == "code"}
    notebook, skip = read_nb(path), skipped_flags() - force
    shell = CaptureShell(path, mpl_format="png")
    for number, cell in enumerate(notebook.cells):
        flags = directives.get(cell.get("id"), {})
        if cell.cell_type != "code" or "nbdev_export(" in cell.source:
            continue
        if skip & {flag.rstrip(":") for flag in flags} or flags.get("eval:", [""])[0].lower() == "false":
            continue
        # The shell drops what a cell prints if it ends in a semicolon; Jupyter drops its result only.
        quiet = cell.source.rstrip().endswith(";")
        outputs = shell.run(f"{cell.source}\n#" if quiet else cell.source)
        cell.outputs = [o for o in outputs if not (quiet and o["output_type"] == "execute_result")]
        outcome.ran += 1
        if shell.exc:
            trace = "".join(traceback.format_exception(shell.exc))
            outcome.failed = f"{path.name}, cell {number} ({cell.get('id')}):\n{cell.source}\n\n{trace}"
            break
        cell.outputs = [slimmer(o) for o in cell.outputs if o.get("name") != "stderr"]
    if store and not outcome.failed:
        config = ConfigParser()
        config.read(root / "settings.ini", encoding="utf-8")
        clean_nb(notebook, allowed_metadata_keys=config["DEFAULT"]["allowed_metadata_keys"].split())
        write_nb(notebook, path)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _child(pipe, path: Path, force: frozenset[str], store: bool) -> None:
    """Run `path` and send its outcome through `pipe`."""
    try:
        outcome = run(path, force, store)
    except BaseException:
        outcome = Outcome(path.name, failed=f"{path.name}:\n{traceback.format_exc()}")
    pipe.send(outcome)
    pipe.close()


def isolated(path: Path, force: frozenset[str] = frozenset(), store: bool = False) -> Outcome:
    """Run `path` in a process of its own, forked from one that has only imported the slow libraries."""
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(preload)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, path, force, store))
    process.start()
    theirs.close()
    try:
        outcome = mine.recv()
    except EOFError:
        process.join()
        outcome = Outcome(path.name, failed=f"{path.name}: the process ended with exit code {process.exitcode}")
    process.join()
    return outcome


def run_all(paths: list[Path], force: frozenset[str], store: bool, workers: int | None = None):
    """The outcome of each notebook, in their order; `workers` at a time (default: cores, at most 4), one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 4)) as pool:
        yield from pool.map(lambda path: isolated(path, force, store), paths)


def faults(path: Path) -> list[str]:
    """What is wrong with the outputs stored in a notebook."""
    from execnb.nbio import read_nb

    found, outputs, code = [], 0, 0
    for number, cell in enumerate(read_nb(path).cells):
        if cell.cell_type != "code":
            continue
        code += bool(cell.source.strip())
        for output in cell.get("outputs", []):
            outputs += 1
            where = f"{path.name}, cell {number}"
            if output["output_type"] == "error":
                found.append(f"{where}: a stored error, {output.get('ename')}")
            data = {"text": output["text"]} if "text" in output else output.get("data", {})
            text = "".join("".join(v) for k, v in data.items() if k.startswith("text"))
            if match := local_path.search(text):
                found.append(f"{where}: a path of one machine, {match.group()}")
    if code > 3 and not outputs:
        found.append(f"{path.name}: no stored outputs; run scripts/run_notebooks.py {path.stem}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="paths, names or numbers; default: all")
    parser.add_argument("--check", action="store_true", help="run nothing, only inspect the stored outputs")
    parser.add_argument("--test", action="store_true", help="run, but leave the files as they are")
    parser.add_argument("--flags", nargs="*", default=[], help="test flags whose cells run after all")
    parser.add_argument("--workers", type=int, help="notebooks at a time")
    args = parser.parse_args()
    paths, bad = find(args.notebooks), 0
    if args.check:
        for line in (line for path in paths for line in faults(path)):
            bad += 1
            print(line, file=sys.stderr)
        print(f"{len(paths)} notebooks looked at, {bad} faults")
        return bool(bad)
    for outcome in run_all(paths, frozenset(args.flags), not args.test, args.workers):
        bad += bool(outcome.failed)
        print(f"{outcome.name}: {outcome.ran} cells, {outcome.seconds:.1f} s{', FAILED' if outcome.failed else ''}")
        if outcome.failed:
            print(outcome.failed, file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
