"""Adds one page of the API reference for each package to the site; a hook of mkdocs (mkdocs.yml)."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"ds2": ROOT / "ds2", "ds2_ops": ROOT / "ops" / "ds2_ops"}


def packages() -> list[str]:
    """Return the dotted names of the packages that get a page: both roots and the packages directly inside them."""
    names = []
    for root, folder in SOURCES.items():
        inner = sorted(init.parent.name for init in folder.glob("*/__init__.py"))
        names += [root, *(f"{root}.{name}" for name in inner)]
    return names


def page(name: str) -> str:
    """Return the text of a package's page; that of a root has its own modules, not the packages inside it."""
    text = f"::: {name}\n"
    if name in SOURCES:
        modules = [name, *(f"{name}.{file.stem}" for file in sorted(SOURCES[name].glob("[a-z]*.py")))]
        text = "\n".join(f"::: {module}\n    options:\n      show_submodules: false\n" for module in modules)
    return f"---\ntitle: {name}\n---\n\n{text}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages to the navigation."""
    nav: list[Any] = config.nav or []
    config.nav = [*nav, {"API": [{name: f"api/{name}.md"} for name in packages()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the files of the site."""
    for name in packages():
        files.append(File.generated(config, f"api/{name}.md", content=page(name)))
    return files
