"""ExpertsConfig: the settings of experts over several devices, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import exact_int
from jaxserve.settings.overrides import check_fields, json_object

NAME = "eplb_config"
# Fields of vLLM's class that have no meaning where nothing is moved, with their values that pass.
_UNMOVED: dict[str, tuple[Any, ...]] = {
    "window_size": (1000,),
    "step_interval": (3000,),
    "log_balancedness": (False,),
    "log_balancedness_interval": (1,),
    "use_async": (True, False),
    "policy": ("default",),
    "communicator": (None,),
}


@dataclass(frozen=True)
class EplbConfig:
    """Settings of the places of experts.

    vLLM moves experts while it serves; here places are chosen at the start, by what an earlier
    engine has counted.

    Args:
        num_redundant_experts: places of a layer beside one for each expert, given to those of the
            most rows as load_path has them.
        load_path: file with the rows of each expert, as record_path makes it; without it experts
            lie in their own order.
        record_path: file that the rows of each expert are written to when the engine closes.

    Raises:
        InvalidRequest: naming the field, and what it may be.
    """

    num_redundant_experts: int = 0
    load_path: str | Path | None = None
    record_path: str | Path | None = None

    def __post_init__(self) -> None:
        exact_int(self.num_redundant_experts, f"{NAME}.num_redundant_experts", 0, 1 << 22)
        for name in ("load_path", "record_path"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | Path) or not str(value)):
                raise InvalidRequest(f"{NAME}.{name} must be a file's name; got {value!r}", NAME)
        if self.num_redundant_experts and self.load_path is None:
            raise InvalidRequest(
                f"{NAME}.num_redundant_experts needs load_path, a file of rows by expert, which an "
                "engine with record_path writes when it closes",
                NAME,
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Settings of experts over several devices.

    Args:
        enable_expert_parallel: of several devices, each has whole experts, not a part of each.
        enable_eplb: count the rows of each expert, and choose the experts' places by eplb_config.
        eplb_config: a JSON object like {"record_path": "rows.json"}, which is written at the end,
            then {"load_path": "rows.json", "num_redundant_experts": 8}.
    """

    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: dict[str, Any] | str | EplbConfig | None = None

    @property
    def eplb(self) -> EplbConfig | None:
        """Settings of the experts' places; None without `enable_eplb`."""
        return (eplb_config(self.eplb_config) or EplbConfig()) if self.enable_eplb else None


def eplb_config(value: EplbConfig | dict[str, Any] | str | None) -> EplbConfig | None:
    """Read the setting: an object of these fields, as one, as a dict or as JSON; None if absent.

    Raises:
        InvalidRequest: it is none, or a field is unknown, without meaning here or out of range.
    """
    if value is None or isinstance(value, EplbConfig):
        return value
    given = dict(json_object(value, NAME) or {})
    for name, neutral in _UNMOVED.items():
        if name in given and (got := given.pop(name)) not in neutral:
            raise InvalidRequest(
                f"{NAME}.{name} is {str(got)[:100]!r}: experts are placed once, at the start, by "
                "load_path; jaxserve:expert_rows_total holds the rows of each device",
                NAME,
            )
    check_fields(given, EplbConfig, NAME)
    return EplbConfig(**given)


def check_eplb(config: Any) -> None:
    """Check the settings of experts, and those of an engine that they need.

    Args:
        config: an `EngineConfig`, which this module cannot know.

    Raises:
        InvalidRequest: naming the field, and what is allowed.
    """
    found = eplb_config(config.eplb_config)
    if not config.enable_eplb:
        if found not in (None, EplbConfig()):
            raise InvalidRequest("eplb_config needs enable_eplb", NAME)
        return
    if not config.enable_expert_parallel or config.tensor_parallel_size < 2:
        raise InvalidRequest(
            "enable_eplb needs enable_expert_parallel and a tensor_parallel_size of 2 or more",
            "enable_eplb",
        )
    if config.has_followers:
        raise InvalidRequest(
            f"enable_eplb with nnodes {config.nnodes}: rows by expert are counted on one host; "
            "allowed: 1",
            "enable_eplb",
        )
