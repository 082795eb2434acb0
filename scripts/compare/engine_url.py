"""Adapter of any server of the OpenAI protocol that runs already."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.compare.engine import Engine


@dataclass(frozen=True)
class Url(Engine):
    """Server that is not started here, so start-up and memory are not measured.

    Attributes:
        base_url: without /v1.
    """

    name: str = "url"
    title: str = "server at --url"
    base_url: str = ""
    settings: str = "as its owner started it"
