"""ExpertsConfig: the settings of experts over several devices, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import exact_int
from jaxserve.settings.overrides import check_fields, json_object

NAME = "eplb_config"
# Fields of vLLM's class that only matter if experts are moved, with the values that are accepted.
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
    """Settings of the placement of a model's experts on devices (expert load balancing).

    vLLM moves experts while it serves. jaxserve places them once, at the start, by the number of
    rows that an earlier engine has counted for each expert. A row is one token computed by one
    expert.

    Args:
        num_redundant_experts: number of additional places for experts in each layer. They hold
            copies of the experts with the most rows in load_path.
        load_path: file with the number of rows of each expert, as record_path writes it. Without it
            experts keep their order.
        record_path: file for the number of rows of each expert, written when the engine closes.

    Raises:
        InvalidRequest: names the field and the allowed values.
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
    """Settings for the experts of a mixture-of-experts model over several devices.

    Args:
        enable_expert_parallel: give each device whole experts instead of a part of every expert.
        enable_eplb: count the rows of each expert, and place the experts by eplb_config.
        eplb_config: a JSON object. {"record_path": "rows.json"} writes the counts at the end,
            {"load_path": "rows.json", "num_redundant_experts": 8} places experts by them.
    """

    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: dict[str, Any] | str | EplbConfig | None = None

    @property
    def eplb(self) -> EplbConfig | None:
        """Settings of the placement of experts, or None if `enable_eplb` is false."""
        return (eplb_config(self.eplb_config) or EplbConfig()) if self.enable_eplb else None


def eplb_config(value: EplbConfig | dict[str, Any] | str | None) -> EplbConfig | None:
    """Return the value of the setting eplb_config as an EplbConfig, or None if it is None.

    Args:
        value: an EplbConfig, a dict of its fields, or JSON text. vLLM's fields for moving experts
            are accepted with their neutral values only.

    Raises:
        InvalidRequest: the value is not an object, or a field is unknown, unsupported or out of
            range.
    """
    if value is None or isinstance(value, EplbConfig):
        return value
    fields = dict(json_object(value, NAME) or {})
    for name, neutral in _UNMOVED.items():
        if name in fields and (got := fields.pop(name)) not in neutral:
            raise InvalidRequest(
                f"{NAME}.{name} is {str(got)[:100]!r}: experts are placed once, at the start, by "
                "load_path; jaxserve:expert_rows_total holds the rows of each device",
                NAME,
            )
    check_fields(fields, EplbConfig, NAME)
    return EplbConfig(**fields)


def check_eplb(config: Any) -> None:
    """Check the settings of experts, and the settings of the engine on which they depend.

    enable_eplb needs enable_expert_parallel, several devices and one host.

    Args:
        config: an `EngineConfig`, which this module cannot import.

    Raises:
        InvalidRequest: names the field and the allowed values.
    """
    eplb = eplb_config(config.eplb_config)
    if not config.enable_eplb:
        if eplb not in (None, EplbConfig()):
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
