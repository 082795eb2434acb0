"""Trial of CUDA: starts it and multiplies. Prints the device's name, or why not (status 1)."""

from __future__ import annotations

import logging
import sys


class Heard(logging.Handler):
    """Messages that JAX logs: it only warns of a plugin that cannot be loaded."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        self.reasons.append(str(error or record.getMessage()))


def try_cuda() -> tuple[bool, str]:
    """Try whether CUDA runs. Return the answer, and the device's name or the reason in a line."""
    heard = Heard()
    logging.getLogger("jax").addHandler(heard)
    try:
        # Imported here: that it fails is one of the answers.
        import jax

        device = jax.devices("gpu")[0]
        ones = jax.device_put(jax.numpy.ones((16, 16)), device)
        jax.block_until_ready(ones @ ones)
    except Exception as error:  # of any library below: whatever it is, there is the CPU
        reason = heard.reasons[0] if heard.reasons else str(error)
        return False, " ".join(reason.split())[:300] or type(error).__name__
    return True, device.device_kind


if __name__ == "__main__":
    runs, text = try_cuda()
    print(text)
    sys.exit(not runs)
