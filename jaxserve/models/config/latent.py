"""Multi-head latent attention in config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.models.config.fields import Fields

MAX_RANK = 1 << 16
MAX_SIZE = 1 << 12


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    Attributes:
        query_rank: rank of the latent queries; None where queries are projected at once.
        rank: rank of the latent keys and values.
        plain, rotary: parts of a query or key head that are not and that are rotated.
        value: size of a value head.
        interleaved: neighbours are rotated as pairs in the checkpoint's order.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    interleaved: bool

    @property
    def key(self) -> int:
        """Size of a query or key head."""
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Size of a head in the cache, where keys and values share one."""
        return max(self.key, self.value)


ReadLatent = Callable[[Fields], Latent | None]


def no_latent(fields: Fields) -> Latent | None:
    """Return None, for attention without latents."""
    return None
