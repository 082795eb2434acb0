"""Command lines that install an extra of this package."""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = Path(__file__).parent.parent.parent


def install_command(extra: str = "", checkout: Path = _CHECKOUT) -> str:
    """Return the `pip install` command that adds an extra to this installation.

    The project is not on the package index, where its name belongs to another project: a command
    names a checkout or a wheel file.

    Args:
        extra: an extra of pyproject.toml, or "" for the package alone.
        checkout: the folder that contains the package.
    """
    is_checkout = (checkout / "pyproject.toml").is_file()
    project, option = (".", "-e ") if is_checkout else ("PATH_OF_WHEEL", "")
    return f"pip install {option}" + (f"'{project}[{extra}]'" if extra else project)
