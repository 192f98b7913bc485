"""Package metadata, read from `settings.ini`, so that nbdev and pip agree."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser()
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]


def needs(extra: str) -> list[str]:
    """The requirements that `settings.ini` lists for `extra`."""
    return cfg.get(f"{extra}_requirements", "").split()


def description() -> str:
    """The README, its pictures by their addresses: a package index has no files of ours."""
    raw = cfg["git_url"].replace("github.com", "raw.githubusercontent.com") + f"/{cfg['branch']}/"
    return (here / "README.md").read_text(encoding="utf-8").replace("](nbs/images/", f"]({raw}nbs/images/")


plots, notebooks = needs("plots"), needs("notebooks")
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=description(),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"], "Changes": cfg["git_url"] + "/blob/main/CHANGELOG.md"},
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["vae_tiles", "vae_tiles.*"]),
    package_data={"vae_tiles": ["py.typed", "data/*", "data/*/*", "data/*/*/*"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        "plots": plots,
        "notebooks": plots + notebooks,
        "dev": plots + needs("dev"),
    },
    entry_points={"console_scripts": cfg["console_scripts"].split("\n")},
    zip_safe=False,
)
