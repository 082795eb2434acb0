"""Multi-head latent attention in config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.models.config.fields import Fields

MAX_RANK = 1 << 16
MAX_SIZE = 1 << 12


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention.

    Attributes:
        query_rank: rank of the latent queries, or None if queries are projected directly.
        rank: rank of the latent keys and values.
        plain, rotary: number of dimensions of a query or key head without and with rotation.
        value: size of a value head.
        interleaved: the checkpoint pairs neighbouring dimensions for the rotation.
        divided: the checkpoint has a matrix of keys and one of values for each head, as GGUF files
            do. Otherwise it has one matrix.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    interleaved: bool
    divided: bool = False

    @property
    def key(self) -> int:
        """Size of a query or key head in latent attention: its plain and its rotated dimensions."""
        return self.plain + self.rotary

    @property
    def cell(self) -> int:
        """Numbers of a token in the cache: the latent of keys and values, and the rotated key."""
        return self.rank + self.rotary


ReadLatent = Callable[[Fields], Latent | None]


def no_latent(fields: Fields) -> Latent | None:
    """Return None: the reader of a config.json's latent attention, for models without it."""
    return None
