"""Values of settings under the names of vLLM and PyTorch, and values that are not served."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequest

# A kernel's name is that of its method.
OTHER_NAMES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "quantization": {
        "auto_awq": "awq",
        "auto_gptq": "gptq",
        "awq_marlin": "awq",
        "fp8_per_channel": "fp8",
        "gptq_marlin": "gptq",
        "inc": "auto-round",
        "int8_per_channel_weight_only": "int8",
        "modelopt_fp4": "modelopt",
    },
}
_AS_ACTIVATIONS = "'auto' takes the dtype of activations, which dtype sets"
_EIGHT_BITS = "8 bits are 'fp8' (e4m3) or, on a CPU, 'int8_per_token_head'"
# Values of settings that only vLLM serves, each with a replacement.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "kv_cache_dtype": {
        **dict.fromkeys(("half", "float16", "bfloat16", "float32"), _AS_ACTIVATIONS),
        **dict.fromkeys(
            ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "nvfp4"), _EIGHT_BITS
        ),
    }
}


def usual_value(value: Any, name: str) -> Any:
    """Return our name of a setting's value.

    Raises:
        InvalidRequest: only vLLM serves this value; the message names a replacement.
    """
    if not isinstance(value, str):
        return value
    if reason := OTHER_VALUES.get(name, {}).get(value):
        raise InvalidRequest(f"{name}={value!r} is not supported: {reason}", name)
    return OTHER_NAMES[name].get(value, value)
