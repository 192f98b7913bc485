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


plots, notebooks = needs("plots"), needs("notebooks")
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
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
