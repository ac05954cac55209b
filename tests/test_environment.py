"""The files that describe the environment and the packages agree with each other and the tree."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def pins() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r.specifier for r in requirements}


def direct_dependencies() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def test_environment_yml_says_what_pyproject_says():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip_section,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    assert pip_section == [*PROJECT["dependencies"], "-e ."]


def test_environment_yml_python_is_allowed():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (python,) = (d for d in dependencies if isinstance(d, str) and d.startswith("python="))
    assert python.removeprefix("python=") in SpecifierSet(PROJECT["requires-python"])


def test_every_direct_dependency_is_pinned():
    pinned = pins()
    missing = [r.name for r in direct_dependencies() if canonicalize_name(r.name) not in pinned]
    assert not missing, f"constraints.txt has no pin for {missing}"


def test_pins_are_exact_and_allowed():
    pinned = pins()
    for name, specifier in pinned.items():
        assert [s.operator for s in specifier] == ["=="], f"{name}{specifier} is not a pin"
    for requirement in direct_dependencies():
        (pin,) = pinned[canonicalize_name(requirement.name)]
        version = Version(pin.version.replace(".*", ".0"))
        assert version in requirement.specifier, f"{requirement} excludes the pin {pin}"


def test_listed_packages_are_the_folders():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "slidedp").rglob("*.py")}
    widgets = {path.parent.relative_to(ROOT) for path in (ROOT / "widgets").rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders}
    found |= {".".join(("slidedp", *folder.parts)) for folder in widgets}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(found) == listed, "adjust [tool.setuptools] packages in pyproject.toml"
    bare = {str(f) for f in folders | widgets if not (ROOT / f / "__init__.py").exists()}
    assert not bare, f"no __init__.py in {bare}"


def test_slidedp_widgets_is_the_widgets_folder():
    package = importlib.import_module("slidedp.widgets")
    assert [Path(entry).resolve() for entry in package.__path__] == [ROOT / "widgets"]
    assert importlib.import_module("slidedp").__file__ == str(ROOT / "slidedp" / "__init__.py")


def test_a_rank_and_the_worker_import_only_what_they_need():
    """Every process of every run pays for it: half a second for pandas, and one for torch's compiler."""
    heavy = "{'pandas', 'torch._dynamo'}"
    code = f"import slidedp.rank, slidedp.host.worker, sys; print({heavy} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"
