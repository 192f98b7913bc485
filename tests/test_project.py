"""The project itself: notebooks, modules, README and documentation in step with one another."""

import ast
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import make_logo
import pytest
import run_notebooks
import yaml
from execnb.nbio import read_nb

root = run_notebooks.root
nbs = root / "nbs"
package = root / "vae_tiles"
notebooks = run_notebooks.find([])
numbered = [p for p in notebooks if re.match(r"\d\d_", p.name)]
each = pytest.mark.parametrize("path", notebooks, ids=run_notebooks.label)


def tracked() -> list[Path]:
    """The files of the project: what git knows, or, outside git, everything but caches."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [p for p in (root / line for line in listed.stdout.splitlines()) if p.is_file()]
    return [p for p in root.rglob("*") if p.is_file() and not re.search(r"(/\.git/|cache|\.egg-info)", p.as_posix())]


def module_of(path: Path) -> str | None:
    """The module that a notebook exports to."""
    for cell in read_nb(path).cells:
        if cell.cell_type == "code" and (m := re.search(r"^#\|\s*default_exp\s+(\S+)", cell.source, re.M)):
            return m.group(1)
    return None


def imported(path: Path) -> set[str]:
    """The modules of ours that a notebook's code imports."""
    found = set()
    for cell in read_nb(path).cells:
        if cell.cell_type != "code":
            continue
        source = re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.M)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "vae_tiles":
                    found |= {a.name for a in node.names}
                elif node.module.startswith("vae_tiles."):
                    found.add(node.module.split(".")[1])
            elif isinstance(node, ast.Import):
                found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("vae_tiles.")}
    return found


def test_numbers_are_unique():
    numbers = [p.name[:2] for p in numbered]
    assert len(set(numbers)) == len(numbers), numbers
    assert all(module_of(p) == p.stem[3:] for p in numbered)


@pytest.mark.parametrize("path", numbered, ids=lambda p: p.stem)
def test_imports_only_lower_numbers(path):
    number = {module_of(p): p.name[:2] for p in numbered}
    late = {m for m in imported(path) if m in number and number[m] >= path.name[:2] and m != module_of(path)}
    assert not late, f"{path.name} imports {sorted(late)}, which come later"


@each
def test_opening(path):
    first = read_nb(path).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# .+\n+> .+", first.source), "a notebook opens with its title and a line on what it is about"


@each
def test_every_cell_has_an_id_of_its_own(path):
    ids = [cell.get("id") for cell in read_nb(path).cells]
    assert all(ids) and len(set(ids)) == len(ids), "run nbdev_clean"


@each
def test_stored_outputs(path):
    assert not run_notebooks.faults(path)


def test_modules_are_in_step_with_notebooks(tmp_path):
    """`nbdev_export` in a copy of the project changes nothing."""
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(nbs, tmp_path / "nbs", ignore=shutil.ignore_patterns(".*", "_proc"))
    copy = tmp_path / "vae_tiles"
    copy.mkdir()
    shutil.copy(package / "__init__.py", copy)
    command = "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, capture_output=True)
    made = {p.name: p.read_text(encoding="utf-8") for p in copy.glob("*.py")}
    ours = {p.name: p.read_text(encoding="utf-8") for p in package.glob("*.py")}
    assert set(made) == set(ours), "a module without a notebook, or the reverse"
    stale = [name for name in made if made[name] != ours[name]]
    assert not stale, f"run nbdev_export: {stale}"


def test_documentation_can_be_made():
    """What `nbdev_docs` does before it hands over to Quarto: every notebook, and an entry for each public function."""
    code = """
        import sys
        from execnb.nbio import read_nb
        from nbdev.processors import FilterDefaults
        for name in sys.argv[1:]:
            notebook = read_nb(name)
            processor = FilterDefaults().nb_proc(notebook)
            try:
                processor.process()
            except Exception as error:  # it runs every cell with an import in it, alone: such cells hold nothing else
                print(name, error)
            for cell in processor.nb.cells:
                outputs = cell.get("outputs", [])
                if any(o["output_type"] == "error" for o in outputs) or ("show_doc(" in cell.source and not outputs):
                    print(name, cell.source)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *[str(p.relative_to(nbs)) for p in notebooks]]
    done = subprocess.run(command, cwd=nbs, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_readme_is_in_step():
    script = root / "scripts" / "make_readme.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def sidebar_entries(item) -> list[str]:
    if isinstance(item, str):
        return [item]
    parts = item if isinstance(item, list) else item.get("contents", [])
    return [entry for part in parts for entry in sidebar_entries(part)]


def test_sidebar_lists_every_notebook():
    entries = sidebar_entries(yaml.safe_load((nbs / "sidebar.yml").read_text())["website"]["sidebar"])
    assert sorted(entries) == sorted(p.relative_to(nbs).as_posix() for p in notebooks)


def test_site_is_complete():
    """What `_quarto.yml` names is there, and pages load nothing from elsewhere."""
    config = yaml.safe_load((nbs / "_quarto.yml").read_text())
    site, html = config["website"], config["format"]["html"]
    named = [site["favicon"], site["navbar"]["logo"], site["open-graph"]["image"], site["twitter-card"]["image"], html["css"]]
    named += [item["href"] for item in site["navbar"]["left"]] + config["metadata-files"]
    named += [name for theme in html["theme"].values() for name in theme if name.endswith(".scss")]
    assert not [name for name in named if not (nbs / name).exists()]
    assert html["html-math-method"] == "mathml" and set(html["theme"]) == {"light", "dark"} and site["search"]


def test_logo_is_drawn_from_a_layout():
    assert (nbs / "images" / "logo.svg").read_text() == make_logo.svg(96)
    assert (nbs / "images" / "favicon.svg").read_text() == make_logo.svg(28)


def test_public_names_are_documented():
    """A docstring, a comment for every parameter, and a place in the reference."""
    import vae_tiles
    from fastcore.docments import docments

    reference = "\n".join(c.source for c in read_nb(nbs / "reference.ipynb").cells)
    for name in vae_tiles.__all__:
        value = getattr(vae_tiles, name)
        silent = [k for k, words in docments(value, returns=False).items() if not words]
        assert value.__doc__ and not silent, f"{name}: {silent}"
        assert f"show_doc(vae_tiles.{name})" in reference, name


def test_nbdev_yml_is_in_step_with_settings():
    site = yaml.safe_load((nbs / "nbdev.yml").read_text())["website"]
    settings = (root / "settings.ini").read_text()
    assert all(f"= {site[key]}\n" in settings for key in ("title", "description", "repo-url", "repo-branch"))


def links(path: Path) -> list[str]:
    """The link targets in a Markdown file's or a notebook's prose."""
    if path.suffix == ".ipynb":
        text = "\n".join(c.source for c in read_nb(path).cells if c.cell_type == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def test_links_lead_somewhere():
    own = (run_notebooks.root / "settings.ini").read_text()
    blob = re.search(r"git_url = (\S+)", own).group(1) + "/blob/main/"
    raw = blob.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
    site = "".join(re.search(rf"^doc_{part} = (\S+)", own, re.M).group(1) for part in ("host", "baseurl")) + "/"
    broken = []
    for path in [p for p in tracked() if p.suffix in {".md", ".ipynb"}]:
        for link in links(path):
            target = link.split("#")[0]
            if target.startswith((blob, raw)):
                there = (root / target.removeprefix(blob).removeprefix(raw)).exists()
            elif target.startswith(site):
                there = (nbs / target.removeprefix(site)).with_suffix(".ipynb").exists()
            elif re.match(r"[a-z]+:", link) or not target:
                continue
            else:
                file = path.parent / target
                there = file.exists() or (file.suffix == ".html" and file.with_suffix(".ipynb").exists())
            if not there:
                broken.append(f"{path.name}: {link}")
    assert not broken


def test_no_paths_of_one_machine():
    found = []
    for path in tracked():
        if path.suffix in {".py", ".md", ".ini", ".toml", ".yml", ".json", ".ipynb"} or path.parent.name == ".ci":
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".ipynb":
                text = "\n".join(c.source for c in read_nb(path).cells)
            found += [f"{path.name}: {m.group()}" for m in re.finditer(r"/(?:root|home|work|tmp)/\w+", text)]
    assert not found


def test_wheel_holds_what_runs(tmp_path):
    """Built from what git knows: every module, the data, the typing marker and the command; small enough to send."""
    files = [p.relative_to(root) for p in tracked()]
    for file in [f for f in files if len(f.parts) == 1 or f.parts[0] == "vae_tiles"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, tmp_path / file)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert not {f.as_posix() for f in files if f.parts[0] == "vae_tiles"} - names
    assert "vae-tiles=vae_tiles.cli:main" in commands.replace(" ", "")
    assert "vae_tiles/py.typed" in names and wheel.stat().st_size < 20e6


def test_no_large_files():
    assert not [p.name for p in tracked() if p.stat().st_size > 3 << 20]


def test_ruff():
    pytest.importorskip("ruff")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", root], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_import_is_light_and_names_are_listed():
    code = "import sys, vae_tiles; assert 'torch' not in sys.modules; print(*sorted(vae_tiles.__all__))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "decode" in done.stdout.split()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        import vae_tiles

        _ = vae_tiles.nonsense
