"""README.md from nbs/index.ipynb, without Quarto: nbdev's own processors, then nbconvert.

    python scripts/make_readme.py           # write README.md
    python scripts/make_readme.py --check   # exit 1 if README.md is not in step
"""

import argparse
import os
import re
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent


def readme() -> str:
    """What README.md should hold."""
    os.chdir(root)
    from execnb.nbio import read_nb
    from nbconvert import MarkdownExporter
    from nbdev.processors import FilterDefaults
    from nbformat import from_dict

    class ReadmeProcs(FilterDefaults):
        def base_procs(self):
            return [p for p in super().base_procs() if p.__name__ not in {"FrontmatterProc", "insert_warning"}]

    processor = ReadmeProcs().nb_proc(read_nb(root / "nbs" / "index.ipynb"))
    processor.process()
    body, _ = MarkdownExporter().from_notebook_node(from_dict(processor.nb))
    body = re.sub(r"\n{3,}", "\n\n", body).strip().replace("](images/", "](nbs/images/")
    return f"<!-- Made from nbs/index.ipynb by scripts/make_readme.py: edit that. -->\n\n{body}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether README.md is in step")
    check, file = parser.parse_args().check, root / "README.md"
    text = readme()
    if check:
        same = file.exists() and file.read_text(encoding="utf-8") == text
        print("README.md is in step" if same else "README.md is out of step: run scripts/make_readme.py")
        return not same
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
